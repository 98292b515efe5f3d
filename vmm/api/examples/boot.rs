//! Boots a machine without a shim and prints its events, to look at a guest kernel or an initramfs alone:
//!
//! ```text
//! cargo run -p vmm-api --example boot -- nacre-vmm vmlinux nacre-agent.cpio [extra command line]
//! ```
//!
//! It ends when the machine does, or with the first stream that the guest opens (the agent is ready).

use std::{
    env,
    error::Error,
    fs::{File, OpenOptions},
    os::fd::AsFd,
    path::Path,
    thread::sleep,
    time::{Duration, Instant},
};

use vmm_api::{Boot, Event, IdRange, map_ids};

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let [vmm, kernel, initramfs, cmdline @ ..] = arguments.as_slice() else {
        return Err("usage: boot VMM KERNEL INITRAMFS [CMDLINE]".into());
    };
    let start = Instant::now();
    let mut vmm = vmm_api::spawn(Path::new(vmm), "info", Duration::from_secs(10))?;
    let (kernel, initramfs) = (File::open(kernel)?, File::open(initramfs)?);
    let kvm = OpenOptions::new().read(true).write(true).open("/dev/kvm")?;
    let next = || loop {
        match vmm.events.try_next() {
            Ok(None) => sleep(Duration::from_millis(1)),
            Ok(Some((event, _stream))) => break Ok(event),
            Err(error) => break Err(error),
        }
    };
    assert_eq!(next()?, Event::Born, "the first event");
    map_ids(vmm.child.id(), IdRange::IDENTITY)?;
    let boot = Boot { vcpus: 1, memory_mib: 256, cmdline: cmdline.join(" ") };
    vmm.client.boot(boot, [kernel.as_fd(), initramfs.as_fd(), kvm.as_fd()])?;
    println!("{:?} booted", start.elapsed());
    loop {
        match next()? {
            Event::Exited { reason, console } => {
                println!("{:?} {reason}\n{console}", start.elapsed());
                break;
            }
            other => {
                println!("{:?} {other:?}", start.elapsed());
                if matches!(other, Event::Connected { .. }) && cmdline.is_empty() {
                    break;
                }
            }
        }
    }
    drop(vmm.client);
    vmm.child.wait()?;
    Ok(())
}
