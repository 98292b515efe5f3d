//! The container's init process, from the clone to the exec.
//!
//! The child runs ordinary code of the agent on a copy of its memory and speaks with it over one socket, the gate:
//!
//! ```text
//!   parent                               child
//!     write id maps ── MAPPED ─▶  (only with a user namespace)
//!                                 prepare: namespaces, mounts, limits, user, entry point
//!     Create replies ◀── READY ──
//!     Start          ── GO ────▶  seccomp, exec
//!     Start replies  ◀── end of stream: the exec has closed the child's end
//! ```
//!
//! Failure: whatever goes wrong in the child is sent instead of READY, or after GO instead of the end of stream: one
//! byte for the kind, then the text; the child then exits with 127. If the parent goes, the child reads the end of
//! stream and exits. A panic in the child is its exit, which the parent sees as an end of stream before READY.
//!
//! Order is the rule here; each step says in a comment what it must come before or after, unless that is evident.

use std::{
    convert::Infallible,
    ffi::CString,
    fmt::Display,
    fs, io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::DirBuilderExt,
    },
    path::Path,
};

use rustix::{
    io::Errno,
    process::{chdir, setrlimit, setsid, umask},
    system::{setdomainname, sethostname},
    thread::{Gid, Uid, set_no_new_privs, set_thread_res_gid, set_thread_res_uid},
};

use crate::{
    credentials, devices, entrypoint, net, root,
    spec::{Plan, Process},
    sys,
};

/// Parent to child: the id maps are written.
pub const MAPPED: u8 = b'M';
/// Child to parent: prepared.
pub const READY: u8 = b'R';
/// Parent to child: exec.
pub const GO: u8 = b'G';

/// Exit status of a child that did not get to its exec.
const FAILED: i32 = 127;

/// What went wrong, for the status code. The values are sent over the gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The entry point is missing.
    NotFound = b'N' as isize,
    /// The entry point may not be run.
    Denied = b'P' as isize,
    /// Anything else.
    Other = b'E' as isize,
}

impl Kind {
    /// From the byte on the gate.
    pub fn from_byte(byte: u8) -> Self {
        match byte {
            b'N' => Self::NotFound,
            b'P' => Self::Denied,
            _ => Self::Other,
        }
    }
}

/// A failure of the child.
#[derive(Debug)]
pub struct Failure {
    /// For the status code.
    pub kind: Kind,
    /// For the user.
    pub text: String,
}

/// Says what failed and on what.
fn during<E: Into<io::Error>>(what: impl Display) -> impl FnOnce(E) -> Failure {
    move |error| {
        let error: io::Error = error.into();
        let reason = error.raw_os_error().map(|raw| entrypoint::errno_text(Errno::from_raw_os_error(raw)));
        let text = format!("error during container init: {what}: {}", reason.unwrap_or_else(|| error.to_string()));
        Failure { kind: Kind::Other, text }
    }
}

/// What the child takes from the agent.
pub struct Inherited<'a> {
    /// What to become.
    pub plan: &'a Plan,
    /// The directory of all shares.
    pub shares: &'a Path,
    /// Standard input, output, error.
    pub stdio: [OwnedFd; 3],
    /// The child's end of the gate.
    pub gate: OwnedFd,
}

/// The child's whole life; returns its exit status when the exec was not reached.
pub fn run(inherited: Inherited<'_>) -> i32 {
    let Inherited { plan, shares, stdio, gate } = inherited;
    // First of all: a copy of another container's stream, held here until the exec, would keep that container from
    // seeing its end of file.
    let Ok(gate) = sys::keep_only(stdio, gate) else { return FAILED };
    let failure = match life(plan, shares, &gate) {
        Ok(never) => match never {},
        Err(failure) => failure,
    };
    let message = [&[failure.kind as u8], failure.text.as_bytes()].concat();
    // Nobody is left to be told if this fails.
    let _ = rustix::io::write(&gate, &message);
    FAILED
}

fn life(plan: &Plan, shares: &Path, gate: &OwnedFd) -> Result<Infallible, Failure> {
    sys::restore_sigpipe();
    join_namespaces(plan, gate)?;
    build_root(plan, shares)?;
    let program = become_process(plan)?;
    let (args, env) = (c_strings(&plan.process.args), c_strings(&environment(plan)));
    rustix::io::write(gate, &[READY]).map_err(during("tell the agent that init is ready"))?;
    expect(gate, GO);
    // As late as can be: the fewer calls the profile must allow for our sake.
    if plan.process.no_new_privileges {
        install_seccomp(plan)?;
    }
    let error = sys::exec(&program, &args, &env);
    let errno = Errno::from_io_error(&error).unwrap_or(Errno::IO);
    let kind = match errno {
        Errno::NOENT => Kind::NotFound,
        Errno::ACCESS | Errno::PERM => Kind::Denied,
        _ => Kind::Other,
    };
    Err(Failure { kind, text: format!("exec {}: {}", program.to_string_lossy(), entrypoint::errno_text(errno)) })
}

/// Waits for one byte of the parent; without it there is no parent any more.
fn expect(gate: &OwnedFd, byte: u8) {
    let mut got = [0];
    let read = rustix::io::retry_on_intr(|| rustix::io::read(gate, &mut got));
    if read != Ok(1) || got[0] != byte {
        sys::exit(FAILED);
    }
}

/// Session, cgroup namespace, names, network; the other namespaces came with the clone.
fn join_namespaces(plan: &Plan, gate: &OwnedFd) -> Result<(), Failure> {
    let created = |flag: libc::c_int| plan.namespaces & flag as u64 != 0;
    setsid().map_err(during("start a session"))?;
    umask(rustix::fs::Mode::empty());
    // Through the agent's /proc, before the user namespace takes the right away.
    if let Some(score) = plan.process.oom_score_adj {
        fs::write("/proc/self/oom_score_adj", score.to_string()).map_err(during("write oom_score_adj"))?;
    }
    if plan.id_maps.is_some() {
        expect(gate, MAPPED);
        set_thread_res_gid(Gid::ROOT, Gid::ROOT, Gid::ROOT).map_err(during("become group 0 of the user namespace"))?;
        set_thread_res_uid(Uid::ROOT, Uid::ROOT, Uid::ROOT).map_err(during("become user 0 of the user namespace"))?;
    }
    // Not with the clone: the namespace's root is the cgroup that its creator is in at that moment.
    sys::new_cgroup_namespace().map_err(during("create the cgroup namespace"))?;
    if let Some(name) = &plan.hostname {
        sethostname(name.as_bytes()).map_err(during(format_args!("set the host name {name:?}")))?;
    }
    if let Some(name) = &plan.domainname {
        setdomainname(name.as_bytes()).map_err(during(format_args!("set the domain name {name:?}")))?;
    }
    if created(libc::CLONE_NEWNET) {
        net::loopback_up().map_err(during("bring the loopback interface up"))?;
    }
    Ok(())
}

fn build_root(plan: &Plan, shares: &Path) -> Result<(), Failure> {
    let mut trees = Vec::with_capacity(plan.mounts.len());
    for mount in &plan.mounts {
        let tree = root::open_share(mount, shares);
        trees.push(tree.map_err(during(format_args!("open the share for {:?}", mount.destination)))?);
    }
    let share = shares.join(&plan.root_share);
    let old = root::enter_root(&share).map_err(during(format_args!("enter the root share {:?}", plan.root_share)))?;
    for (mount, tree) in plan.mounts.iter().zip(&trees) {
        root::make(mount, tree.as_ref()).map_err(during(format_args!("mount on {:?}", mount.destination)))?;
    }
    devices::make(&plan.mounts, &plan.devices, &old).map_err(during("make the device nodes in /dev"))?;
    root::leave_old_root(&old).map_err(during("leave the agent's root"))?;
    for (name, value) in &plan.sysctls {
        fs::write(Path::new("/proc/sys").join(name), value).map_err(during(format_args!("set sysctl {name:?}")))?;
    }
    make_cwd(plan)?;
    if let Some(propagation) = plan.root_propagation {
        root::propagate(propagation, Path::new("/")).map_err(during("set the propagation of the root"))?;
    }
    protect(plan)
}

/// As runc does: a working directory that the image lacks is made, while the root is still writable.
fn make_cwd(plan: &Plan) -> Result<(), Failure> {
    let cwd = &plan.process.cwd;
    if cwd == Path::new("/") {
        return Ok(());
    }
    let made = fs::DirBuilder::new().recursive(true).mode(0o755).create(cwd);
    made.map_err(during(format_args!("make the working directory {cwd:?}")))
}

fn protect(plan: &Plan) -> Result<(), Failure> {
    for path in &plan.readonly_paths {
        root::make_readonly(path, true).map_err(during(format_args!("make {path:?} read-only")))?;
    }
    if !plan.masked_paths.is_empty() {
        let null = root::open_null().map_err(during("open /dev/null to mask paths"))?;
        for path in &plan.masked_paths {
            root::mask(path, null.as_fd()).map_err(during(format_args!("mask {path:?}")))?;
        }
    }
    if plan.root_readonly {
        root::make_readonly("/", false).map_err(during("make the root read-only"))?;
    }
    Ok(())
}

/// Limits, directory, user; ends with the program's path.
fn become_process(plan: &Plan) -> Result<CString, Failure> {
    let process = &plan.process;
    for (resource, limit) in &process.rlimits {
        setrlimit(*resource, *limit).map_err(during(format_args!("set the resource limit {resource:?}")))?;
    }
    set_priorities(process)?;
    // As root first: the directory may be one that only root may enter. Else as the user, below: it may be on a file
    // system where root may not.
    let entered = chdir(&process.cwd);
    let who = &process.credentials;
    who.shrink_bounding_set().map_err(during("drop capabilities from the bounding set"))?;
    if process.no_new_privileges {
        set_no_new_privs(true).map_err(during("set no_new_privs"))?;
    } else {
        // Needs CAP_SYS_ADMIN, which is about to go.
        install_seccomp(plan)?;
    }
    who.become_user().map_err(during(user_text(who)))?;
    who.apply_capabilities().map_err(during("set the capabilities"))?;
    if entered.is_err() {
        chdir(&process.cwd).map_err(during(format_args!("enter the working directory {:?}", process.cwd)))?;
    }
    umask(rustix::fs::Mode::from_raw_mode(process.umask));
    let path = process.env.iter().rev().find_map(|variable| variable.strip_prefix("PATH=")).unwrap_or_default();
    let name = process.args.first().map(String::as_str).unwrap_or_default();
    entrypoint::look_up(name, path).map_err(|error| {
        let kind = match error {
            entrypoint::Error::Directory(_) | entrypoint::Error::NotExecutable(_) => Kind::Denied,
            _ => Kind::NotFound,
        };
        Failure { kind, text: error.to_string() }
    })
}

/// On the guest's CPUs and disks, and what the kernel shows of itself.
fn set_priorities(process: &Process) -> Result<(), Failure> {
    if let Some(scheduler) = &process.scheduler {
        sys::set_scheduler(scheduler).map_err(during("set the scheduling policy"))?;
    }
    if let Some(priority) = process.io_priority {
        sys::set_io_priority(priority).map_err(during("set the I/O priority"))?;
    }
    if let Some(domain) = process.personality {
        sys::set_personality(domain).map_err(during("set the personality"))?;
    }
    Ok(())
}

fn user_text(who: &credentials::Credentials) -> String {
    format!("become user {} and group {}", who.uid, who.gid)
}

fn install_seccomp(plan: &Plan) -> Result<(), Failure> {
    match &plan.process.seccomp {
        Some(filter) => {
            sys::install_seccomp(&filter.program, filter.flags).map_err(during("install the seccomp filter"))
        }
        None => Ok(()),
    }
}

/// The spec's environment, with HOME from the image's /etc/passwd when it is not set, as under runc. The file is
/// parsed here: libc would load the image's name service modules into the agent.
fn environment(plan: &Plan) -> Vec<String> {
    let mut env = plan.process.env.clone();
    if !env.iter().any(|variable| variable.starts_with("HOME=") && variable.len() > "HOME=".len()) {
        env.retain(|variable| !variable.starts_with("HOME="));
        let passwd = fs::read_to_string("/etc/passwd").unwrap_or_default();
        env.push(format!("HOME={}", home_of(plan.process.credentials.uid, &passwd)));
    }
    env
}

/// Field 6 of the first line of `passwd` whose field 3 is `uid`, else the root directory.
fn home_of(uid: u32, passwd: &str) -> &str {
    let of_user = |line: &&str| line.split(':').nth(2).is_some_and(|field| field.parse() == Ok(uid));
    let home = passwd.lines().find(of_user).and_then(|line| line.split(':').nth(5));
    home.filter(|home| !home.is_empty()).unwrap_or("/")
}

/// NULs were refused when the plan was made; a string that has one all the same is dropped.
fn c_strings(list: &[String]) -> Vec<CString> {
    list.iter().filter_map(|text| CString::new(text.as_str()).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn home_comes_from_the_images_passwd() {
        let passwd = "root:x:0:0:root:/root:/bin/sh\nbroken\napp:x:1000:1000::/srv/app:/bin/sh\nnohome:x:7:7:::\n";
        assert_eq!(home_of(0, passwd), "/root");
        assert_eq!(home_of(1000, passwd), "/srv/app");
        assert_eq!(home_of(7, passwd), "/");
        assert_eq!(home_of(4242, passwd), "/");
        assert_eq!(home_of(0, ""), "/");
    }

    #[test]
    fn a_failure_says_what_on_what_and_why() {
        let failure = during::<Errno>(format_args!("mount on {:?}", Path::new("/proc")))(Errno::NOENT);
        assert_eq!(failure.text, r#"error during container init: mount on "/proc": no such file or directory"#);
    }
}
