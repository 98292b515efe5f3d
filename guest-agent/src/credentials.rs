//! Who the container's process is: ids, groups and the five capability sets.
//!
//! Order matters and is fixed here: the bounding set shrinks while CAP_SETPCAP is still there; the ids change with
//! "keep capabilities" on, or the permitted set would be lost; the sets are written last. Ambient capabilities come
//! after that, because each must already be permitted and inheritable.

use oci_spec::runtime::{Capabilities, Capability};
use rustix::{
    io::Errno,
    thread::{
        CapabilitySet, CapabilitySets, Gid, Uid, clear_ambient_capability_set, configure_capability_in_ambient_set,
        remove_capability_from_bounding_set, set_capabilities, set_keep_capabilities, set_thread_groups,
        set_thread_res_gid, set_thread_res_uid,
    },
};

/// Ids and capabilities of a process. Capability sets are bit masks by capability number.
#[derive(Clone, Debug, Default)]
#[expect(missing_docs, reason = "named as in the runtime spec")]
pub struct Credentials {
    pub uid: u32,
    pub gid: u32,
    pub groups: Vec<u32>,
    pub bounding: u64,
    pub effective: u64,
    pub permitted: u64,
    pub inheritable: u64,
    pub ambient: u64,
}

/// Capabilities in the order of their numbers (linux/capability.h).
const BY_NUMBER: [Capability; 41] = [
    Capability::Chown,
    Capability::DacOverride,
    Capability::DacReadSearch,
    Capability::Fowner,
    Capability::Fsetid,
    Capability::Kill,
    Capability::Setgid,
    Capability::Setuid,
    Capability::Setpcap,
    Capability::LinuxImmutable,
    Capability::NetBindService,
    Capability::NetBroadcast,
    Capability::NetAdmin,
    Capability::NetRaw,
    Capability::IpcLock,
    Capability::IpcOwner,
    Capability::SysModule,
    Capability::SysRawio,
    Capability::SysChroot,
    Capability::SysPtrace,
    Capability::SysPacct,
    Capability::SysAdmin,
    Capability::SysBoot,
    Capability::SysNice,
    Capability::SysResource,
    Capability::SysTime,
    Capability::SysTtyConfig,
    Capability::Mknod,
    Capability::Lease,
    Capability::AuditWrite,
    Capability::AuditControl,
    Capability::Setfcap,
    Capability::MacOverride,
    Capability::MacAdmin,
    Capability::Syslog,
    Capability::WakeAlarm,
    Capability::BlockSuspend,
    Capability::AuditRead,
    Capability::Perfmon,
    Capability::Bpf,
    Capability::CheckpointRestore,
];

/// The bit mask of a set of the spec.
pub fn capability_bits(set: &Capabilities) -> u64 {
    BY_NUMBER.iter().enumerate().filter(|(_, cap)| set.contains(cap)).map(|(bit, _)| 1 << bit).sum()
}

impl Credentials {
    /// Takes everything out of the bounding set that is not in ours. Needs CAP_SETPCAP.
    pub fn shrink_bounding_set(&self) -> rustix::io::Result<()> {
        for bit in (0..BY_NUMBER.len()).filter(|bit| self.bounding & (1 << bit) == 0) {
            match remove_capability_from_bounding_set(CapabilitySet::from_bits_retain(1 << bit)) {
                // A kernel that does not know the capability cannot grant it either.
                Err(Errno::INVAL) | Ok(()) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Becomes the user, with all permitted capabilities kept for [`Credentials::apply_capabilities`].
    pub fn become_user(&self) -> rustix::io::Result<()> {
        set_keep_capabilities(true)?;
        let groups: Vec<Gid> = self.groups.iter().map(|gid| Gid::from_raw(*gid)).collect();
        set_thread_groups(&groups)?;
        let (uid, gid) = (Uid::from_raw(self.uid), Gid::from_raw(self.gid));
        set_thread_res_gid(gid, gid, gid)?;
        set_thread_res_uid(uid, uid, uid)?;
        set_keep_capabilities(false)
    }

    /// Sets effective, permitted, inheritable and ambient capabilities.
    pub fn apply_capabilities(&self) -> rustix::io::Result<()> {
        set_capabilities(
            None,
            CapabilitySets {
                effective: CapabilitySet::from_bits_retain(self.effective),
                permitted: CapabilitySet::from_bits_retain(self.permitted),
                inheritable: CapabilitySet::from_bits_retain(self.inheritable),
            },
        )?;
        if self.ambient == 0 {
            return Ok(());
        }
        clear_ambient_capability_set()?;
        for bit in (0..BY_NUMBER.len()).filter(|bit| self.ambient & (1 << bit) != 0) {
            configure_capability_in_ambient_set(CapabilitySet::from_bits_retain(1 << bit), true)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capability_numbers_are_the_kernels() {
        let bits = |cap| capability_bits(&Capabilities::from([cap]));
        assert_eq!(bits(Capability::Chown), 1 << 0);
        assert_eq!(bits(Capability::NetRaw), 1 << 13);
        assert_eq!(bits(Capability::SysAdmin), 1 << 21);
        assert_eq!(bits(Capability::Mknod), 1 << 27);
        assert_eq!(bits(Capability::CheckpointRestore), 1 << 40);
    }
}
