//! A lab machine as a QEMU command line. Pure: no file is touched here.
//!
//! The guest finds root and input by their labels, `lab` and `lab-in`, and the output disk by its serial number. The root disk is opened with `snapshot=on`: its
//! writes go to an unlinked file, so a boot is always fresh and leaves nothing.
//!
//! A counted machine must not see how long the host takes for anything. While its CPU waits for a disk, the virtual clock
//! jumps to the next timer, so the length of every fsync would depend on the host. Its root and input are therefore
//! persistent memory (NVDIMMs, mapped privately from the same files): reads and writes are instructions. virtio-serial is told `ioeventfd=off`
//! for the same reason: a write to a port is done in the CPU's thread, and the guest does not spin until another thread of
//! the host gets to it.

use std::path::{Path, PathBuf};

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
    /// Its size.
    pub root_bytes: u64,
    /// ext4 disk with command, stage and inputs.
    pub input: PathBuf,
    /// Its size.
    pub input_bytes: u64,
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
const KERNEL_WORDS: &str = "console=ttyS0 quiet loglevel=5 panic=-1 softlockup_panic=1 watchdog_thresh=10 \
     nokaslr selinux=0 apparmor=0 cgroup_no_v1=all random.trust_cpu=on tsc=reliable";

/// Without fast string instructions Linux clears and copies by eight bytes, and every one of these counts as an
/// instruction. With them it is each byte: 4,096 for a page, which a processor clears in about a hundred cycles (ADR-0013).
const COUNTED_CPU: &str = "max,-erms,-fsrm,-fzrm,-fsrs";

impl Machine {
    /// The arguments of `qemu-system-x86_64`.
    pub fn arguments(&self) -> Vec<String> {
        let mut args = Vec::new();
        let mut add = |words: &[&str]| args.extend(words.iter().map(|w| w.to_string()));
        add(&["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-name", "lab"]);
        match self.accel {
            Accel::Tcg => add(&["-accel", "tcg,thread=multi", "-cpu", "max"]),
            Accel::Counted => {
                add(&["-accel", "tcg", "-cpu", COUNTED_CPU, "-icount", "shift=0,sleep=off", "-seed", "1"]);
                add(&["-rtc", "base=2026-01-01T00:00:00,clock=vm"]);
            }
            Accel::Kvm => add(&["-accel", "kvm", "-cpu", "host"]),
        }
        add(&["-smp", &self.cpus.to_string()]);
        add(&["-kernel", &self.kernel.to_string_lossy(), "-initrd", &self.initrd.to_string_lossy()]);
        add(&["-append", &self.kernel_words()]);
        args.extend(self.disks());
        let mut add = |words: &[&str]| args.extend(words.iter().map(|w| w.to_string()));
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

    /// Whether disks are memory, for counting.
    fn disks_are_memory(&self) -> bool {
        self.accel == Accel::Counted
    }

    /// The kernel's command line.
    fn kernel_words(&self) -> String {
        let disks = if self.disks_are_memory() { "pmem" } else { "blk" };
        format!("{KERNEL_WORDS} lab.disks={disks} {}", self.append.as_deref().unwrap_or("")).trim_end().to_string()
    }

    /// Memory, root, input and output.
    fn disks(&self) -> Vec<String> {
        let (root, input) = (self.root.display(), self.input.display());
        let mut args = if self.disks_are_memory() {
            let mut args = words(&["-machine", "pc,nvdimm=on"]);
            args.extend(["-m".into(), format!("{},slots=2,maxmem={}M", self.memory, self.memory + NVDIMM_SPACE)]);
            args.extend(nvdimm("root", &self.root, self.root_bytes));
            args.extend(nvdimm("in", &self.input, self.input_bytes));
            args
        } else {
            let root = format!("file={root},if=virtio,format=raw,cache=unsafe,snapshot=on");
            let input = format!("file={input},if=virtio,format=raw,readonly=on");
            words(&["-machine", "pc", "-m", &self.memory.to_string(), "-drive", &root, "-drive", &input])
        };
        if let Some(output) = &self.output {
            let drive = format!("file={},if=none,id=disk,format=raw,cache=unsafe", output.display());
            args.extend(words(&["-drive", &drive, "-device", "virtio-blk-pci,drive=disk,serial=lab-out"]));
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

/// A disk that is memory. What the guest writes stays in private pages.
fn nvdimm(id: &str, path: &Path, bytes: u64) -> Vec<String> {
    let memory = format!("memory-backend-file,id={id},mem-path={},size={bytes},share=off", path.display());
    words(&["-object", &memory, "-device", &format!("nvdimm,memdev={id}")])
}

/// Owned words.
fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(|w| w.to_string()).collect()
}

/// MiB of address space for NVDIMMs.
const NVDIMM_SPACE: u32 = 64 * 1024;

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
            root_bytes: 1 << 30,
            input: "/r/in.img".into(),
            input_bytes: 128 << 20,
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
        assert!(line.contains("-smp 2") && line.contains("-m 4096"));
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
    fn only_counted_mode_lacks_fast_string_instructions() {
        assert!(line(&machine(Accel::Counted)).contains("-cpu max,-erms,-fsrm,-fzrm,-fsrs "));
        assert!(!line(&machine(Accel::Tcg)).contains("erms"));
    }

    #[test]
    fn a_lockup_ends_the_boot() {
        for word in ["softlockup_panic=1", "watchdog_thresh=10", "panic=-1"] {
            assert!(KERNEL_WORDS.split_whitespace().any(|w| w == word), "{word}");
        }
    }

    #[test]
    fn an_output_disk_is_known_by_its_serial() {
        let mut m = machine(Accel::Kvm);
        assert!(!line(&m).contains("lab-out"));
        m.output = Some("/r/out.img".into());
        assert!(line(&m).contains("drive=disk,serial=lab-out"));
    }

    #[test]
    fn a_counted_root_is_memory_that_is_never_written_back() {
        let line = line(&machine(Accel::Counted));
        assert!(line.contains("mem-path=/c/root.img,size=1073741824,share=off"));
        assert!(line.contains("mem-path=/r/in.img,size=134217728,share=off"));
        assert!(line.contains("lab.disks=pmem") && !line.contains("snapshot"));
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
