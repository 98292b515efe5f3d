//! From the OCI spec as written for a host to what a guest does: [`Plan`].
//!
//! Input is the runtime spec's JSON and the list of mounts that are shares. What comes out holds no `Option` that
//! means "default" and nothing that only a host can act on. Three kinds of things are in a spec:
//! - acted on: everything that has a field in [`Plan`];
//! - without meaning in the guest, dropped: AppArmor and SELinux labels, hooks (they ran on the host), the host's
//!   cgroup path, device cgroup rules (the guest has no device worth guarding), devices of the host's hardware, CPU and
//!   memory node lists and block I/O limits (numbers of the host's CPUs and disks), swap (the guest has none), `root.path`;
//! - impossible, refused by name: a terminal (until the protocol has one), a bind mount of a host path that has no
//!   share and is not below /proc, /sys or /dev (there the guest's own is bound), a file system type that the guest does not serve, a time namespace.
//!
//! Namespaces: a type without `path` is created. A type with `path` means "the pod's", which is the agent's own: the
//! pod's NICs appear there. The pod's process namespace is that of its sandbox container, if it has one. The sandbox
//! container itself (as CRI's annotation names it) *is* the pod, so its host name, IPC and network are the agent's own.
//! A type that is absent is the agent's own too, except mount and cgroup, which are always
//! the container's: without the first it could take the agent's mounts away, without the second the agent could not
//! find its processes.

use std::{collections::HashMap, ffi::CString, path::PathBuf};

use agent_proto::ShareMount;
use oci_spec::runtime::{Linux, LinuxIdMapping, LinuxNamespaceType, PosixRlimitType, Process as OciProcess, Spec};
use rustix::process::{Resource, Rlimit};

use crate::{
    cgroup,
    credentials::{Credentials, capability_bits},
    devices,
    mounts::{self, Mount, Propagation},
    priorities, seccomp,
};

/// Annotations by which containerd and CRI-O name the sandbox container of a pod.
const SANDBOX: [(&str, &str); 2] =
    [("io.kubernetes.cri.container-type", "sandbox"), ("io.kubernetes.cri-o.ContainerType", "sandbox")];

/// Everything needed to build one container, checked.
#[derive(Debug)]
pub struct Plan {
    /// The share that is the root.
    pub root_share: String,
    /// Whether the root is mounted read-only in the end.
    pub root_readonly: bool,
    /// Propagation of the root when it is not private.
    pub root_propagation: Option<Propagation>,
    /// In order.
    pub mounts: Vec<Mount>,
    /// CLONE_NEW* of the namespaces to create with the process.
    pub namespaces: u64,
    /// Whether the process belongs into the process namespace of the pod's sandbox container.
    pub in_pod_pids: bool,
    /// Whether this is the pod's sandbox container.
    pub is_sandbox: bool,
    /// `uid_map` and `gid_map`, when there is a user namespace.
    pub id_maps: Option<IdMaps>,
    /// Set in the container's UTS namespace.
    pub hostname: Option<String>,
    /// Same.
    pub domainname: Option<String>,
    /// File below /proc/sys and value.
    pub sysctls: Vec<(String, String)>,
    /// Hidden from the container.
    pub masked_paths: Vec<String>,
    /// Made read-only.
    pub readonly_paths: Vec<String>,
    /// Nodes besides the default ones.
    pub devices: Vec<devices::Node>,
    /// File and value in the container's cgroup.
    pub cgroup_values: Vec<(String, String)>,
    /// The process to run.
    pub process: Process,
}

/// The container's init process.
#[derive(Debug)]
pub struct Process {
    /// At least one.
    pub args: Vec<String>,
    /// `NAME=value`.
    pub env: Vec<String>,
    /// Absolute.
    pub cwd: PathBuf,
    /// User, groups, capabilities.
    pub credentials: Credentials,
    /// File mode creation mask.
    pub umask: u32,
    /// Resource limits.
    pub rlimits: Vec<(Resource, Rlimit)>,
    /// Whether exec may raise privileges.
    pub no_new_privileges: bool,
    /// Preference as a victim when memory runs out.
    pub oom_score_adj: Option<i32>,
    /// How the guest's CPUs are given to it, when the spec says so.
    pub scheduler: Option<libc::sched_attr>,
    /// Class and level, as ioprio_set(2) has them in one number.
    pub io_priority: Option<u32>,
    /// Execution domain, as personality(2) has it.
    pub personality: Option<u32>,
    /// Compiled filter, when there is a profile.
    pub seccomp: Option<seccomp::Filter>,
}

/// The two id maps of a user namespace.
#[derive(Debug, PartialEq, Eq)]
pub struct IdMaps {
    /// Users.
    pub uid: Vec<IdRange>,
    /// Groups.
    pub gid: Vec<IdRange>,
}

/// `size` ids from `container` on are those from `guest` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "named by the type's own doc")]
pub struct IdRange {
    pub container: u32,
    pub guest: u32,
    pub size: u32,
}

/// The guest's id for the container's `id`, if it is mapped.
pub fn mapped(ranges: &[IdRange], id: u32) -> Option<u32> {
    let range = ranges.iter().find(|range| id.checked_sub(range.container).is_some_and(|at| at < range.size))?;
    range.guest.checked_add(id - range.container)
}

/// Why a spec cannot be carried out.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Not the JSON of a runtime spec.
    #[error("the spec is not a valid OCI runtime spec: {0}")]
    Json(#[from] serde_json::Error),
    /// A required part is missing or empty.
    #[error("the spec has no {0}: it is needed to run a container")]
    Missing(&'static str),
    /// `process.terminal` is set.
    #[error("the spec asks for a terminal, which this agent cannot give yet: run without one")]
    Terminal,
    /// A namespace type that the guest does not offer.
    #[error("the spec asks for a {0} namespace, which containers of a guest cannot have")]
    Namespace(&'static str),
    /// `root_share` or a mount's share is not one plain name.
    #[error("{0:?} cannot be the name of a share: it must be one path component")]
    ShareName(String),
    /// `share_mounts` names a mount that does not exist.
    #[error("share mount {0} is outside of the spec's list of mounts")]
    MountIndex(u32),
    /// A path that must be absolute is not.
    #[error("{what} {path:?} is not an absolute path")]
    Relative {
        /// Which field.
        what: &'static str,
        /// Its value.
        path: String,
    },
    /// A string that goes to the kernel has a NUL inside.
    #[error("{0} contains a NUL byte")]
    Nul(&'static str),
    /// A mount that the guest cannot make.
    #[error(transparent)]
    Mount(#[from] mounts::PlanError),
    /// A limit of the resources.
    #[error(transparent)]
    Cgroup(#[from] cgroup::PlanError),
    /// The seccomp profile.
    #[error(transparent)]
    Seccomp(#[from] seccomp::Error),
}

impl Plan {
    /// The guest's user and group ids of the container's process: those it has outside of its user namespace.
    pub fn owner(&self) -> (u32, u32) {
        let who = &self.process.credentials;
        match &self.id_maps {
            Some(maps) => {
                (mapped(&maps.uid, who.uid).unwrap_or(who.uid), mapped(&maps.gid, who.gid).unwrap_or(who.gid))
            }
            None => (who.uid, who.gid),
        }
    }
}

/// Reduces `json` to a plan.
pub fn reduce(json: &[u8], root_share: &str, share_mounts: &[ShareMount]) -> Result<Plan, Error> {
    let spec: Spec = serde_json::from_slice(json)?;
    let process = spec.process().as_ref().ok_or(Error::Missing("process"))?;
    let linux = spec.linux().clone().unwrap_or_default();
    let is_sandbox = spec
        .annotations()
        .as_ref()
        .is_some_and(|all| SANDBOX.iter().any(|(key, value)| all.get(*key).is_some_and(|v| v == value)));
    let wanted = linux.namespaces().as_deref().unwrap_or_default();
    let mut namespaces = namespaces(wanted)?;
    if is_sandbox {
        namespaces &= !((libc::CLONE_NEWUTS | libc::CLONE_NEWIPC | libc::CLONE_NEWNET) as u64);
    }
    let id_maps = (namespaces & libc::CLONE_NEWUSER as u64 != 0).then(|| IdMaps {
        uid: id_ranges(linux.uid_mappings().as_ref()),
        gid: id_ranges(linux.gid_mappings().as_ref()),
    });
    Ok(Plan {
        root_share: share_name(root_share)?,
        root_readonly: spec.root().as_ref().and_then(|root| root.readonly()).unwrap_or(false),
        root_propagation: linux.rootfs_propagation().as_deref().and_then(Propagation::named),
        mounts: plan_mounts(&spec, share_mounts, namespaces)?,
        namespaces,
        in_pod_pids: wanted.iter().any(|ns| ns.typ() == LinuxNamespaceType::Pid && ns.path().is_some()),
        is_sandbox,
        id_maps,
        hostname: spec.hostname().clone().filter(|name| !name.is_empty()),
        domainname: spec.domainname().clone().filter(|name| !name.is_empty()),
        sysctls: sysctls(linux.sysctl().as_ref()),
        masked_paths: linux.masked_paths().clone().unwrap_or_default(),
        readonly_paths: linux.readonly_paths().clone().unwrap_or_default(),
        devices: devices::plan(linux.devices().as_deref().unwrap_or_default()),
        cgroup_values: linux.resources().as_ref().map(cgroup::values).transpose()?.unwrap_or_default(),
        process: plan_process(process, &linux)?,
    })
}

/// A share name is one component: it is joined to the directory of all shares.
fn share_name(name: &str) -> Result<String, Error> {
    let plain = !name.is_empty() && name != "." && name != ".." && !name.contains(['/', '\0']);
    if plain { Ok(name.to_owned()) } else { Err(Error::ShareName(name.to_owned())) }
}

fn plan_mounts(spec: &Spec, share_mounts: &[ShareMount], namespaces: u64) -> Result<Vec<Mount>, Error> {
    let written = spec.mounts().as_deref().unwrap_or_default();
    let mut shares = HashMap::new();
    for mount in share_mounts {
        if mount.mount_index as usize >= written.len() {
            return Err(Error::MountIndex(mount.mount_index));
        }
        shares.insert(mount.mount_index as usize, share_name(&mount.share)?);
    }
    let created = |flag: libc::c_int| namespaces & flag as u64 != 0;
    let plan = |(index, mount)| {
        let mut planned = mounts::plan(mount, shares.remove(&index))?;
        if created(libc::CLONE_NEWUSER) && !created(libc::CLONE_NEWNET) {
            planned.use_own_sysfs();
        }
        Ok(planned)
    };
    written.iter().enumerate().map(plan).collect()
}

fn namespaces(wanted: &[oci_spec::runtime::LinuxNamespace]) -> Result<u64, Error> {
    let mut flags = libc::CLONE_NEWNS as u64;
    for namespace in wanted.iter().filter(|namespace| namespace.path().is_none()) {
        flags |= match namespace.typ() {
            LinuxNamespaceType::Mount => libc::CLONE_NEWNS,
            LinuxNamespaceType::Uts => libc::CLONE_NEWUTS,
            LinuxNamespaceType::Ipc => libc::CLONE_NEWIPC,
            LinuxNamespaceType::User => libc::CLONE_NEWUSER,
            LinuxNamespaceType::Pid => libc::CLONE_NEWPID,
            LinuxNamespaceType::Network => libc::CLONE_NEWNET,
            // Created by the child, once it is in its cgroup (see init.rs).
            LinuxNamespaceType::Cgroup => 0,
            LinuxNamespaceType::Time => return Err(Error::Namespace("time")),
        } as u64;
    }
    Ok(flags)
}

fn id_ranges(written: Option<&Vec<LinuxIdMapping>>) -> Vec<IdRange> {
    let range =
        |map: &LinuxIdMapping| IdRange { container: map.container_id(), guest: map.host_id(), size: map.size() };
    written.into_iter().flatten().map(range).collect()
}

/// `net.ipv4.ip_forward` becomes `net/ipv4/ip_forward`; a name written with slashes keeps its dots.
fn sysctls(written: Option<&HashMap<String, String>>) -> Vec<(String, String)> {
    let path = |name: &str| if name.contains('/') { name.to_owned() } else { name.replace('.', "/") };
    let mut list: Vec<_> = written.into_iter().flatten().map(|(name, value)| (path(name), value.clone())).collect();
    list.sort();
    list
}

fn plan_process(process: &OciProcess, linux: &Linux) -> Result<Process, Error> {
    if process.terminal().unwrap_or(false) {
        return Err(Error::Terminal);
    }
    let args = process.args().clone().unwrap_or_default();
    let env = process.env().clone().unwrap_or_default();
    if args.is_empty() {
        return Err(Error::Missing("process.args"));
    }
    for (what, list) in [("process.args", &args), ("process.env", &env)] {
        if list.iter().any(|item| CString::new(item.as_str()).is_err()) {
            return Err(Error::Nul(what));
        }
    }
    let cwd = process.cwd().clone();
    if !cwd.is_absolute() {
        return Err(Error::Relative { what: "process.cwd", path: cwd.display().to_string() });
    }
    let user = process.user();
    let set = |pick: fn(&oci_spec::runtime::LinuxCapabilities) -> &Option<oci_spec::runtime::Capabilities>| {
        process.capabilities().as_ref().and_then(|caps| pick(caps).as_ref()).map_or(0, capability_bits)
    };
    Ok(Process {
        args,
        env,
        cwd,
        credentials: Credentials {
            uid: user.uid(),
            gid: user.gid(),
            groups: user.additional_gids().clone().unwrap_or_default(),
            bounding: set(|caps| caps.bounding()),
            effective: set(|caps| caps.effective()),
            permitted: set(|caps| caps.permitted()),
            inheritable: set(|caps| caps.inheritable()),
            ambient: set(|caps| caps.ambient()),
        },
        umask: user.umask().unwrap_or(0o022),
        rlimits: process.rlimits().iter().flatten().map(rlimit).collect(),
        no_new_privileges: process.no_new_privileges().unwrap_or(false),
        oom_score_adj: process.oom_score_adj(),
        scheduler: process.scheduler().as_ref().map(priorities::scheduler),
        io_priority: process.io_priority().as_ref().map(priorities::io),
        personality: linux.personality().as_ref().map(priorities::personality),
        seccomp: linux.seccomp().as_ref().map(seccomp::compile).transpose()?,
    })
}

fn rlimit(limit: &oci_spec::runtime::PosixRlimit) -> (Resource, Rlimit) {
    let resource = match limit.typ() {
        PosixRlimitType::RlimitCpu => Resource::Cpu,
        PosixRlimitType::RlimitFsize => Resource::Fsize,
        PosixRlimitType::RlimitData => Resource::Data,
        PosixRlimitType::RlimitStack => Resource::Stack,
        PosixRlimitType::RlimitCore => Resource::Core,
        PosixRlimitType::RlimitRss => Resource::Rss,
        PosixRlimitType::RlimitNproc => Resource::Nproc,
        PosixRlimitType::RlimitNofile => Resource::Nofile,
        PosixRlimitType::RlimitMemlock => Resource::Memlock,
        PosixRlimitType::RlimitAs => Resource::As,
        PosixRlimitType::RlimitLocks => Resource::Locks,
        PosixRlimitType::RlimitSigpending => Resource::Sigpending,
        PosixRlimitType::RlimitMsgqueue => Resource::Msgqueue,
        PosixRlimitType::RlimitNice => Resource::Nice,
        PosixRlimitType::RlimitRtprio => Resource::Rtprio,
        PosixRlimitType::RlimitRttime => Resource::Rttime,
    };
    // u64::MAX is how the spec writes "no limit".
    let value = |value: u64| (value != u64::MAX).then_some(value);
    (resource, Rlimit { current: value(limit.soft()), maximum: value(limit.hard()) })
}

#[cfg(test)]
#[path = "spec_tests.rs"]
mod tests;
