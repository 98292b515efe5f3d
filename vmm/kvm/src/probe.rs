//! Whether this host's KVM can run a guest kernel: a tiny one is run, and timed.
//!
//! ```text
//!   Started ──► 200,000 instructions ──► Counted ──► what every kernel does in its first moments ──► Done
//! ```
//!
//! There are hosts whose `/dev/kvm` answers every request and runs the kernel mode of a guest in software, a thousand times
//! too slow, and gives up on instructions that any kernel uses. Nothing but a run tells them from true ones.
//!
//! The payload reports each stage by a write to [`PORT`]; the time between the first two is the measurement. There is no
//! deadline in here: a KVM that never comes back is killed with the process, by whoever asked.

use std::{
    os::fd::OwnedFd,
    time::{Duration, Instant},
};

use vm_memory::{Bytes, GuestAddress, GuestMemoryError};

use crate::{Exit, Host, HostError, Memory, MemoryError, Vcpu, Vm, VmError, x86_64};

/// Instructions between the first two stages: two in each turn of the loop.
pub const INSTRUCTIONS: u64 = 2 * TURNS as u64;
const TURNS: u32 = 100_000;

/// Memory of the probe in MiB: its page tables, its stack and a page of code.
const MEMORY_MIB: u32 = 4;

/// The port on which the payload speaks.
const PORT: u16 = 0xf4;

/// Returns from KVM_RUN that are nothing to us, signals mostly, before the probe gives up.
const MAX_DETOURS: u32 = 1000;

/// How far the payload has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Its first instruction ran.
    Started,
    /// It has counted to its end.
    Counted,
    /// It has used what kernels use.
    Done,
}

/// Why a probe did not come to its end.
#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    /// KVM is missing or lacks something.
    #[error(transparent)]
    Host(#[from] HostError),
    /// No memory.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The payload does not fit into it.
    #[error("cannot write the probe's payload: {0}")]
    Payload(#[from] GuestMemoryError),
    /// KVM refused.
    #[error(transparent)]
    Vm(#[from] VmError),
    /// KVM gave up while the payload ran.
    #[error("KVM stopped the guest {}: {message}", match reached {
        None => "before its first instruction",
        Some(Stage::Started) => "while it counted",
        Some(_) => "at an instruction that every kernel uses",
    })]
    Stopped {
        /// The last stage that was reported.
        reached: Option<Stage>,
        /// How long the counting took, if it was done.
        counted_in: Option<Duration>,
        /// What KVM said.
        message: String,
    },
}

/// Runs the payload on an open `/dev/kvm`; how long its [`INSTRUCTIONS`] took.
pub fn probe(device: OwnedFd) -> Result<Duration, ProbeError> {
    let host = Host::new(device)?;
    let memory = Memory::new(MEMORY_MIB)?;
    x86_64::write_flat_tables(&memory)?;
    memory.ram().write_slice(&payload(), GuestAddress(x86_64::HIGH_MEMORY))?;
    let vm = Vm::new(&host, memory)?;
    let template = x86_64::cpuid_template(&host, 1)?;
    let mut vcpu = vm.vcpu(0)?;
    x86_64::prepare_at(&vcpu, &template, x86_64::HIGH_MEMORY)?;
    run(&mut vcpu)
}

fn run(vcpu: &mut Vcpu) -> Result<Duration, ProbeError> {
    let (mut reached, mut started, mut counted_in) = (None, Instant::now(), None);
    for _ in 0..MAX_DETOURS {
        let message = match vcpu.run() {
            Exit::PortOut(PORT, [0]) => {
                (reached, started) = (Some(Stage::Started), Instant::now());
                continue;
            }
            Exit::PortOut(PORT, [1]) => {
                (reached, counted_in) = (Some(Stage::Counted), Some(started.elapsed()));
                continue;
            }
            Exit::PortOut(PORT, [2]) => return Ok(counted_in.unwrap_or_default()),
            Exit::Again => continue,
            Exit::Shutdown => "triple fault".to_owned(),
            Exit::Fault(message) => message,
            other => format!("unexpected {other:?}"),
        };
        return Err(ProbeError::Stopped { reached, counted_in, message });
    }
    Err(ProbeError::Stopped { reached, counted_in, message: "it comes back without end".into() })
}

/// The payload: 64-bit code for address [`x86_64::HIGH_MEMORY`], in ring 0.
fn payload() -> Vec<u8> {
    let [p0, p1] = PORT.to_le_bytes();
    let [n0, n1, n2, n3] = TURNS.to_le_bytes();
    let parts: [&[u8]; 19] = [
        &[0x66, 0xba, p0, p1],                 // mov dx, PORT
        &[0x31, 0xc0, 0xee],                   // xor eax, eax; out dx, al             Started
        &[0xb9, n0, n1, n2, n3],               // mov ecx, TURNS
        &[0xff, 0xc9, 0x75, 0xfc],             // dec ecx; jnz -4
        &[0xb0, 0x01, 0xee],                   // mov al, 1; out dx, al                Counted
        &[0xb9, 0x80, 0x00, 0x00, 0xc0],       // mov ecx, EFER
        &[0x0f, 0x32, 0x0f, 0x30],             // rdmsr; wrmsr
        &[0x0f, 0x20, 0xd8],                   // mov rax, cr3
        &[0x0f, 0x22, 0xd8],                   // mov cr3, rax
        &[0x0f, 0x20, 0xe0],                   // mov rax, cr4
        &[0x0d, 0x00, 0x06, 0x00, 0x00],       // or eax, OSFXSR | OSXMMEXCPT
        &[0x0f, 0x22, 0xe0],                   // mov cr4, rax
        &[0x0f, 0x57, 0xc0],                   // xorps xmm0, xmm0
        &[0x0f, 0x11, 0x44, 0x24, 0xf0],       // movups [rsp - 16], xmm0
        &[0x0f, 0x01, 0xf8, 0x0f, 0x01, 0xf8], // swapgs; swapgs
        &[0x31, 0xc0, 0x31, 0xc9, 0x0f, 0xa2], // xor eax, eax; xor ecx, ecx; cpuid
        &[0x66, 0xba, p0, p1],                 // mov dx, PORT
        &[0xb0, 0x02, 0xee],                   // mov al, 2; out dx, al                Done
        &[0xf4, 0xeb, 0xfd],                   // hlt; jmp -3
    ];
    parts.concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loop_jumps_back_to_its_own_start() {
        let code = payload();
        let count = code.windows(4).position(|four| four == TURNS.to_le_bytes()).expect("there");
        let (body, jump) = (count + 4, code[count + 4..].iter().position(|byte| *byte == 0x75).expect("a jnz"));
        // It is relative to the instruction after it.
        assert_eq!(jump as i64 + 2 + i64::from(code[body + jump + 1] as i8), 0);
        assert!(code.len() < 4096, "one page");
    }

    #[test]
    fn failure_says_how_far_the_guest_has_come() {
        let stopped = |reached| ProbeError::Stopped { reached, counted_in: None, message: "x".into() }.to_string();
        assert_eq!(stopped(None), "KVM stopped the guest before its first instruction: x");
        assert_eq!(stopped(Some(Stage::Counted)), "KVM stopped the guest at an instruction that every kernel uses: x");
    }

    #[test]
    fn probe_blames_nothing_but_the_host() {
        let open = |path: &str| std::fs::OpenOptions::new().read(true).write(true).open(path).map(OwnedFd::from);
        let other = probe(open("/dev/null").expect("every host has it"));
        assert!(matches!(other, Err(ProbeError::Host(HostError::Version(_)))), "{other:?}");
        let Ok(device) = open("/dev/kvm") else { return };
        match probe(device) {
            Ok(time) => assert!(time > Duration::ZERO),
            Err(ProbeError::Host(_) | ProbeError::Stopped { .. }) => {}
            Err(other) => panic!("the probe itself is at fault: {other}"),
        }
    }
}
