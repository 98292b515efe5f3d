//! Giving up what is not needed: limits, ids, capabilities.

use rustix::{
    io::Errno,
    process::{Resource, Rlimit, getrlimit, setrlimit},
    thread::{
        CapabilitySet, CapabilitySets, Gid, Uid, capability_is_in_bounding_set, clear_ambient_capability_set,
        remove_capability_from_bounding_set, set_capabilities, set_no_new_privs, set_thread_groups, set_thread_res_gid,
        set_thread_res_uid,
    },
};

use super::JailError;

/// What serving files with other owners than root needs, within the user namespace: to act on anyone's file (`DAC_*`,
/// `FOWNER`, `FSETID`), to give files to others (`CHOWN`), fifos and sockets (`MKNOD`; devices are refused outside of
/// the host's namespace), file capabilities (`SETFCAP`).
const FOR_FILES: CapabilitySet = CapabilitySet::CHOWN
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::DAC_READ_SEARCH)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::FSETID)
    .union(CapabilitySet::MKNOD)
    .union(CapabilitySet::SETFCAP);

/// Capabilities are numbered from 0; there are no more than this many bits for them.
const CAPABILITIES: u32 = 64;

/// Limits that the whole life of the process has. As many files as allowed: the share tree bounds itself.
pub fn limit() -> Result<(), JailError> {
    let files = getrlimit(Resource::Nofile);
    let limits = [
        (Resource::Nofile, Rlimit { current: files.maximum, maximum: files.maximum }),
        // A core holds the guest's memory.
        (Resource::Core, Rlimit { current: Some(0), maximum: Some(0) }),
        (Resource::Msgqueue, Rlimit { current: Some(0), maximum: Some(0) }),
        (Resource::Memlock, Rlimit { current: Some(0), maximum: Some(0) }),
    ];
    for (resource, limit) in limits {
        setrlimit(resource, limit).map_err(|errno| JailError::Privilege { what: "resource limits", errno })?;
    }
    Ok(())
}

/// Becomes root of the user namespace, with the capabilities that serving files needs, for good.
pub fn drop_all_but_files() -> Result<(), JailError> {
    let giving_up = |what| move |errno: Errno| JailError::Privilege { what, errno };
    // No other thread exists yet, so what is said of the thread is true of the process.
    set_thread_groups(&[]).map_err(giving_up("the host's groups (has the owner mapped our ids?)"))?;
    let (gid, uid) = (Gid::ROOT, Uid::ROOT);
    set_thread_res_gid(gid, gid, gid).map_err(giving_up("the host's group (has the owner mapped our ids?)"))?;
    set_thread_res_uid(uid, uid, uid).map_err(giving_up("the host's user (has the owner mapped our ids?)"))?;
    clear_ambient_capability_set().map_err(giving_up("ambient capabilities"))?;
    for number in 0..CAPABILITIES {
        let one = CapabilitySet::from_bits_retain(1 << number);
        if FOR_FILES.contains(one) {
            continue;
        }
        match capability_is_in_bounding_set(one) {
            // The kernel has no more.
            Err(Errno::INVAL) => break,
            Ok(false) => {}
            _ => remove_capability_from_bounding_set(one).map_err(giving_up("the bounding set"))?,
        }
    }
    let kept = CapabilitySets { effective: FOR_FILES, permitted: FOR_FILES, inheritable: CapabilitySet::empty() };
    set_capabilities(None, kept).map_err(giving_up("capabilities"))?;
    set_no_new_privs(true).map_err(giving_up("new privileges"))
}
