//! A lab machine as a QEMU command line. Pure: no file is touched here.
//!
//! Fixed order of disks, as the guest names them by it: root (vda), input (vdb), output (vdc). The root disk is opened with
//! `snapshot=on`: its writes go to an unlinked file, so a boot is always fresh and leaves nothing. virtio-serial is told
//! `ioeventfd=off`: a write to a port is then handled in the CPU's thread, and a counted guest does not spin for a number of
//! instructions that depends on the host's scheduler.

use std::path::PathBuf;

/// Who executes the guest's instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Accel {
    /// Software emulation, one host thread a CPU.
    Tcg,
    /// Software emulation with one virtual nanosecond an instruction.
    Counted,
    /// Hardware, nested.
    Kvm,
}

/// Everything that a command line is made of.
#[derive(Debug, Clone)]
pub struct Machine {
    /// Who executes.
    pub accel: Accel,
    /// CPUs.
    pub cpus: u32,
    /// MiB.
    pub memory: u32,
    /// Kernel image.
    pub kernel: PathBuf,
    /// Initrd with the disk driver.
    pub initrd: PathBuf,
    /// Root disk, never written.
    pub root: PathBuf,
    /// ext4 disk with command, stage and inputs.
    pub input: PathBuf,
    /// Raw disk for the output tar.
    pub output: Option<PathBuf>,
    /// Folder of the sockets `ctl`, `out`, `err` (and `tty`) and of the console log.
    pub folder: PathBuf,
    /// A terminal on hvc0 by the socket `tty`.
    pub terminal: bool,
    /// More words for the kernel.
    pub append: Option<String>,
}

/// The kernel's words. A lock-up of the emulator must end the boot with a trace; `-no-reboot` turns the reset into an exit.
const KERNEL_WORDS: &str = "console=ttyS0 root=/dev/vda quiet loglevel=5 panic=-1 softlockup_panic=1 watchdog_thresh=10 \
     nokaslr selinux=0 apparmor=0 cgroup_no_v1=all random.trust_cpu=on tsc=reliable";

impl Machine {
    /// The arguments of `qemu-system-x86_64`.
    pub fn arguments(&self) -> Vec<String> {
        let mut args = Vec::new();
        let mut add = |words: &[&str]| args.extend(words.iter().map(|w| w.to_string()));
        add(&["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-name", "lab"]);
        match self.accel {
            Accel::Tcg => add(&["-accel", "tcg,thread=multi", "-cpu", "max"]),
            Accel::Counted => {
                add(&["-accel", "tcg", "-cpu", "max", "-icount", "shift=0,sleep=off", "-seed", "1"]);
                add(&["-rtc", "base=2026-01-01T00:00:00,clock=vm"]);
            }
            Accel::Kvm => add(&["-accel", "kvm", "-cpu", "host"]),
        }
        add(&["-smp", &self.cpus.to_string(), "-m", &self.memory.to_string()]);
        add(&["-kernel", &self.kernel.to_string_lossy(), "-initrd", &self.initrd.to_string_lossy()]);
        let words = match &self.append {
            Some(more) => format!("{KERNEL_WORDS} {more}"),
            None => KERNEL_WORDS.to_string(),
        };
        add(&["-append", &words]);
        add(&["-drive", &format!("file={},if=virtio,format=raw,cache=unsafe,snapshot=on", self.root.display())]);
        add(&["-drive", &format!("file={},if=virtio,format=raw,readonly=on", self.input.display())]);
        if let Some(output) = &self.output {
            add(&["-drive", &format!("file={},if=virtio,format=raw,cache=unsafe", output.display())]);
        }
        add(&["-chardev", &format!("file,id=console,path={}", self.file("console.log"))]);
        add(&["-serial", "chardev:console"]);
        add(&["-device", "virtio-serial-pci,ioeventfd=off,max_ports=8"]);
        if self.terminal {
            add(&["-chardev", &self.socket("tty"), "-device", "virtconsole,chardev=tty,nr=0"]);
        }
        for (nr, name) in PORTS.iter().enumerate() {
            let device = format!("virtserialport,chardev={name},name=lab.{name},nr={}", nr + 1);
            add(&["-chardev", &self.socket(name), "-device", &device]);
        }
        args
    }

    /// A file in the folder of this boot.
    fn file(&self, name: &str) -> String {
        self.folder.join(name).to_string_lossy().into_owned()
    }

    /// `lab` listens before QEMU starts, so that no byte is lost.
    fn socket(&self, name: &str) -> String {
        format!("socket,id={name},path={},server=off", self.file(name))
    }
}

/// The ports every lab has.
pub const PORTS: [&str; 3] = ["ctl", "out", "err"];

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(accel: Accel) -> Machine {
        Machine {
            accel,
            cpus: 2,
            memory: 4096,
            kernel: "/c/vmlinuz".into(),
            initrd: "/c/initrd".into(),
            root: "/c/root.img".into(),
            input: "/r/in.img".into(),
            output: None,
            folder: "/r".into(),
            terminal: false,
            append: None,
        }
    }

    fn line(m: &Machine) -> String {
        m.arguments().join(" ")
    }

    #[test]
    fn plain_mode_has_threads_and_a_base_that_is_never_written() {
        let line = line(&machine(Accel::Tcg));
        assert!(line.contains("-accel tcg,thread=multi -cpu max"));
        assert!(line.contains("file=/c/root.img,if=virtio,format=raw,cache=unsafe,snapshot=on"));
        assert!(line.contains("-smp 2 -m 4096"));
        assert!(line.contains("-no-reboot"));
        assert!(!line.contains("icount"));
    }

    #[test]
    fn counted_mode_has_a_clock_of_instructions() {
        let line = line(&machine(Accel::Counted));
        assert!(line.contains("-icount shift=0,sleep=off"));
        assert!(line.contains("clock=vm"));
    }

    #[test]
    fn a_lockup_ends_the_boot() {
        for word in ["softlockup_panic=1", "watchdog_thresh=10", "panic=-1"] {
            assert!(KERNEL_WORDS.split_whitespace().any(|w| w == word), "{word}");
        }
    }

    #[test]
    fn disks_keep_their_order() {
        let mut m = machine(Accel::Kvm);
        m.output = Some("/r/out.img".into());
        let args = m.arguments();
        let disks: Vec<_> = args.iter().filter(|a| a.starts_with("file=")).collect();
        assert!(disks[0].contains("root.img") && disks[1].contains("in.img") && disks[2].contains("out.img"));
    }

    #[test]
    fn ports_have_the_names_that_the_guest_looks_for() {
        let line = line(&machine(Accel::Tcg));
        for name in ["lab.ctl", "lab.out", "lab.err"] {
            assert!(line.contains(&format!("name={name}")));
        }
        assert!(!line.contains("virtconsole"));
    }
}
