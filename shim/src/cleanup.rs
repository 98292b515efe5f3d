//! The `delete` action: a fresh process that removes what a pod may have left behind.
//!
//! containerd executes it after a crash of the shim and after every normal removal, possibly twice, possibly on a bundle
//! that is half gone. So every step is optional and none fails; nothing is asked of a shim or a VM, which may hang. All
//! waits together stay below containerd's five seconds.
//!
//! ```text
//!   shared with another bundle? ── no ──► kill VMM, shim (recorded, start time checked) ──► remove the socket
//!        ├── yes, and the shim is dead ──► kill the VMM
//!        ├── its pid or address is not recorded ──► by its command line ([`crate::stray`])
//!        └── either way ──► kill the holder ──► unmount rootfs ──► answer {137, now}
//! ```
//!
//! Killing the shim is enough to end the rest: the VMM sees its control socket close, the holder its lifeline, and the
//! mounts go with their namespace. The records of VMM and holder are for those that are stopped or hang.

use std::{
    fs,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use config::Asked;
use containerd_shim_protos::api::DeleteResponse;
use nix::mount::{MntFlags, umount2};
use protobuf::{Message, MessageField, well_known_types::timestamp::Timestamp};

use crate::{
    bundle::{Bundle, HOLDER_PID, ROOTFS, SHIM_PID, VMM_PID},
    cgroup::Cgroup,
    flags::Flags,
    log_file, stray,
};

/// What a killed container exits with: 128 + SIGKILL.
pub const KILLED: u32 = 137;

/// How long one killed process may take to vanish: three of them fit into containerd's budget.
const PATIENCE: Duration = Duration::from_millis(1300);

/// The whole action. The result is what goes to standard output.
#[must_use]
pub fn delete(flags: &Flags) -> Vec<u8> {
    let bundle = Bundle::new(if flags.bundle.is_empty() { "." } else { flags.bundle.as_str() });
    let bundle = match fs::canonicalize(bundle.directory()) {
        Ok(absolute) => Bundle::new(absolute),
        Err(_) => bundle,
    };
    // Read before anything else: containerd may be taking the bundle away, file by file.
    let (recorded, address) = (bundle.recorded(SHIM_PID), bundle.address());
    let shim = if bundle.has_ended() { None } else { recorded.or_else(|| stray::find(flags, &bundle)) };
    let address = address.or_else(|| Some(format!("unix://{}", stray::socket(shim?)?)));
    let shared = address.as_deref().is_some_and(|address| bundle.shares(address));
    // A server that is dead protects nobody, and its VMM may be recorded in this bundle alone.
    if !shared || shim.is_some_and(|shim| !shim.is_alive()) {
        end(&bundle, VMM_PID);
        if let Some(shim) = shim {
            shim.kill(PATIENCE);
            bundle.forget(SHIM_PID);
        }
    }
    // The last one takes the socket: a new server of the group may listen there by now.
    let socket = address.as_deref().and_then(|address| address.strip_prefix("unix://"));
    if let (false, Some(socket)) = (shared, socket) {
        let _ = fs::remove_file(socket);
    }
    // A server that ends by itself leaves no pid, and prunes its log itself.
    if !shared && shim.is_some() {
        prune_logs(&bundle);
    }
    let pid = end(&bundle, HOLDER_PID);
    let _ = umount2(&bundle.path(ROOTFS), MntFlags::MNT_DETACH);
    // What a stuck process keeps is its own affair: everybody that was recorded is dead.
    let _ = Cgroup::recorded(&bundle).and_then(Cgroup::leave);
    response(pid.unwrap_or_default())
}

fn end(bundle: &Bundle, name: &str) -> Option<u32> {
    let process = bundle.recorded(name)?;
    process.kill(PATIENCE);
    bundle.forget(name);
    Some(process.pid)
}

/// The log of a pod whose shim was killed stays, but not for ever.
fn prune_logs(bundle: &Bundle) {
    let asked = Asked::in_bundle(bundle.directory()).unwrap_or_default();
    // Illegal settings: the server has logged where the defaults say.
    let shim = config::load(&asked.operators()).unwrap_or_default().spec.shim;
    if let Some(directory) = &shim.log_dir {
        log_file::prune(directory, shim.log_keep);
    }
}

fn response(pid: u32) -> Vec<u8> {
    let response = DeleteResponse {
        pid,
        exit_status: KILLED,
        exited_at: MessageField::some(timestamp(SystemTime::now())),
        ..DeleteResponse::default()
    };
    // Encoding into memory fails only on messages beyond 2 GiB.
    response.write_to_bytes().unwrap_or_default()
}

/// A time as protobuf has it.
#[must_use]
pub fn timestamp(time: SystemTime) -> Timestamp {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    Timestamp {
        seconds: i64::try_from(since.as_secs()).unwrap_or(i64::MAX),
        nanos: i32::try_from(since.subsec_nanos()).unwrap_or_default(),
        ..Timestamp::default()
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};

    use super::*;

    fn sleeper() -> Child {
        Command::new("sleep").arg("60").spawn().expect("spawn")
    }

    fn delete_in(bundle: &Bundle) -> DeleteResponse {
        let flags = Flags { bundle: bundle.directory().display().to_string(), ..Flags::default() };
        DeleteResponse::parse_from_bytes(&delete(&flags)).expect("a DeleteResponse")
    }

    #[test]
    fn missing_bundle_is_deleted_already() {
        let answer = delete_in(&Bundle::new("/nonexistent/bundle"));
        assert_eq!((answer.pid, answer.exit_status), (0, KILLED));
        assert!(answer.exited_at.seconds > 0);
    }

    #[test]
    fn leftover_processes_are_killed_and_the_second_delete_finds_nothing() {
        let parent = tempfile::tempdir().expect("temporary directory");
        let bundle = Bundle::new(parent.path().join("c1"));
        fs::create_dir(bundle.directory()).expect("create");
        let mut children = [sleeper(), sleeper(), sleeper()];
        for (name, child) in [SHIM_PID, VMM_PID, HOLDER_PID].iter().zip(&children) {
            bundle.record(name, child.id()).expect("record");
        }
        let socket = parent.path().join("s");
        fs::write(&socket, "").expect("write");
        bundle.write_address(&format!("unix://{}", socket.display())).expect("address");
        assert_eq!(delete_in(&bundle).pid, children[2].id());
        for child in &mut children {
            assert!(child.wait().expect("wait").code().is_none());
        }
        assert!(!socket.exists());
        assert_eq!(delete_in(&bundle).pid, 0);
    }

    #[test]
    fn stopped_vmm_of_a_shared_shim_that_died_is_killed_by_the_first_delete() {
        let parent = tempfile::tempdir().expect("temporary directory");
        let bundles = ["c1", "c2"].map(|id| Bundle::new(parent.path().join(id)));
        let (mut shim, mut vmm) = (sleeper(), sleeper());
        for bundle in &bundles {
            fs::create_dir(bundle.directory()).expect("create");
            bundle.write_address("unix:///nonexistent/s").expect("address");
            bundle.record(SHIM_PID, shim.id()).expect("record");
        }
        bundles[0].record(VMM_PID, vmm.id()).expect("record");
        shim.kill().expect("kill");
        shim.wait().expect("wait");
        delete_in(&bundles[0]);
        assert!(vmm.wait().expect("wait").code().is_none());
    }

    #[test]
    fn second_container_of_a_group_leaves_the_shared_shim_alone() {
        let parent = tempfile::tempdir().expect("temporary directory");
        let bundles = ["c1", "c2"].map(|id| Bundle::new(parent.path().join(id)));
        let mut shim = sleeper();
        for bundle in &bundles {
            fs::create_dir(bundle.directory()).expect("create");
            bundle.write_address("unix:///nonexistent/s").expect("address");
            bundle.record(SHIM_PID, shim.id()).expect("record");
        }
        delete_in(&bundles[1]);
        assert_eq!(shim.try_wait().expect("wait"), None);
        fs::remove_dir_all(bundles[1].directory()).expect("containerd removes the bundle");
        delete_in(&bundles[0]);
        assert!(shim.wait().expect("wait").code().is_none());
    }
}
