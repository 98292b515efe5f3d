//! A mount of this host's FUSE client whose requests go through a ring.

use std::ffi::CString;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

use super::Outcome;
use super::ring::Ring;

/// Unmounted when dropped.
pub struct Mounted {
    at: PathBuf,
    bridge: Option<JoinHandle<()>>,
}

impl Mounted {
    pub fn new(ring: Ring, at: &Path) -> Outcome<Mounted> {
        let device = File::options().read(true).write(true).open("/dev/fuse")?;
        let options = format!(
            "fd={},rootmode=40000,user_id=0,group_id=0,default_permissions,allow_other,max_read=1048576",
            device.as_raw_fd()
        );
        mount("shares", at, "fuse", MountFlags::empty(), CString::new(options)?.as_c_str())?;
        let bridge = std::thread::spawn(move || bridge(ring, &device));
        Ok(Mounted { at: at.to_owned(), bridge: Some(bridge) })
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = unmount(&self.at, UnmountFlags::DETACH);
        if let Some(bridge) = self.bridge.take() {
            let _ = bridge.join();
        }
    }
}

/// Until the mount is gone.
fn bridge(mut ring: Ring, device: &File) {
    while let Ok(length) = ring.take(device) {
        if let Err(error) = ring.serve(length, device) {
            eprintln!("the ring broke: {error}");
            return;
        }
    }
}
