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
    fs::File,
    os::fd::AsFd,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use vmm_api::{Boot, Channel, Client, Event};

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let [vmm, kernel, initramfs, cmdline @ ..] = arguments.as_slice() else {
        return Err("usage: boot VMM KERNEL INITRAMFS [CMDLINE]".into());
    };
    let start = Instant::now();
    let (control, theirs) = Channel::pair()?;
    let (events, their_events) = Channel::pair()?;
    let mut child = Command::new(vmm).stdin(Stdio::from(theirs)).stdout(Stdio::from(their_events)).spawn()?;
    let client = Client::new(control, Duration::from_secs(10))?;
    let boot = Boot { vcpus: 1, memory_mib: 256, cmdline: cmdline.join(" ") };
    client.boot(boot, File::open(kernel)?.as_fd(), File::open(initramfs)?.as_fd())?;
    println!("{:?} booted", start.elapsed());
    loop {
        let (event, _fds): (Event, _) = events.recv()?;
        match event {
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
    drop(client);
    child.wait()?;
    Ok(())
}
