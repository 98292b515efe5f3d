//! Which system calls each thread may make: one list a role, and an end for the process at any other call.
//!
//! A call that is on no list raises SIGSYS in its thread; [`kvm::trap`] writes thread, name and number of the call to the
//! log and ends the process, which the owner sees as the death of the machine. No list looks at arguments but those of
//! `ioctl`, so that the kernel keeps the answers in a bitmap and asks no program at all (seccomp's action cache).
//!
//! A thread's list also binds the threads that it starts, therefore all are started before any has taken its list, and
//! none starts another.

use std::io;

use seccompiler::{BpfProgram, apply_filter};
use syscalls::Sysno;

use super::{JailError, filter};

/// What a thread is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Answers the owner's requests.
    Control,
    /// Runs a processor, and with it the register windows of devices.
    Vcpu,
    /// Serves the shares.
    Files,
    /// Carries streams between guest and owner.
    Sockets,
    /// Takes what the guest prints.
    Console,
    /// Gives the guest entropy.
    Entropy,
    /// Gives the guest's free memory back.
    Balloon,
}

/// Memory, locks, the log, the end: what every thread of a Rust program does.
const EVERYONE: &[Sysno] = &[
    Sysno::brk,
    Sysno::mmap,
    Sysno::munmap,
    Sysno::mremap,
    Sysno::madvise,
    Sysno::mprotect, // malloc grows the arena of a thread with it
    Sysno::futex,
    Sysno::sched_yield,
    Sysno::clock_gettime, // where the vDSO has no clock
    Sysno::getrandom,     // seeds of hash tables
    Sysno::read,          // bells
    Sysno::write,         // bells and the log
    Sysno::close,
    Sysno::fcntl, // duplicates of bells
    Sysno::restart_syscall,
    Sysno::rt_sigprocmask,
    Sysno::rt_sigaction, // abort
    Sysno::rt_sigreturn,
    Sysno::sigaltstack,
    Sysno::getpid,
    Sysno::gettid,
    Sysno::tgkill, // abort
    Sysno::exit,
    Sysno::exit_group,
];

/// A device's event loop, and telling the owner how a machine ended.
const EVENT_LOOP: &[Sysno] = &[Sysno::epoll_create1, Sysno::epoll_ctl, Sysno::epoll_wait, Sysno::epoll_pwait];

/// Finding out what a descriptor is.
const LOOK: &[Sysno] = &[Sysno::fstat, Sysno::newfstatat, Sysno::statx, Sysno::fstatfs];

/// Messages with descriptors.
const MESSAGES: &[Sysno] = &[Sysno::sendmsg, Sysno::recvmsg];

/// What FUSE requests become, each relative to a directory that the owner handed in.
const FILES: &[Sysno] = &[
    Sysno::open, // of /proc/self/fd
    Sysno::openat,
    Sysno::readlinkat,
    Sysno::faccessat,
    Sysno::faccessat2,
    Sysno::preadv,
    Sysno::pwritev,
    Sysno::pread64,
    Sysno::pwrite64,
    Sysno::lseek,
    Sysno::getdents64,
    Sysno::ftruncate,
    Sysno::fallocate,
    Sysno::fsync,
    Sysno::fdatasync,
    Sysno::syncfs,
    Sysno::copy_file_range,
    Sysno::renameat,
    Sysno::renameat2,
    Sysno::linkat,
    Sysno::symlinkat,
    Sysno::unlinkat,
    Sysno::mkdirat,
    Sysno::mknodat,
    Sysno::fchmod,
    Sysno::fchmodat,
    Sysno::fchown,
    Sysno::fchownat,
    Sysno::utimensat,
    Sysno::flock,
    Sysno::getxattr,
    Sysno::setxattr,
    Sysno::listxattr,
    Sysno::removexattr,
    Sysno::fgetxattr,
    Sysno::fsetxattr,
    Sysno::flistxattr,
    Sysno::fremovexattr,
];

/// Both ends of a stream.
const STREAMS: &[Sysno] = &[
    Sysno::socketpair,
    Sysno::shutdown,
    Sysno::sendto,
    Sysno::recvfrom,
    Sysno::readv,
    Sysno::writev,
    Sysno::getsockopt,
    Sysno::setsockopt,
];

/// `KVM_RUN`: the only ioctl that a running machine needs (linux/kvm.h: `_IO(0xAE, 0x80)`).
const KVM_RUN: u32 = 0xae80;

/// `FIONBIO`: a stream that must not block (asm-generic/ioctls.h).
const FIONBIO: u32 = 0x5421;

impl Role {
    /// Restricts the calling thread, for good.
    pub fn restrict(self) -> Result<(), JailError> {
        apply_filter(&self.program())
            .map_err(|error| JailError::Seccomp { role: self, source: io::Error::other(error.to_string()) })
    }

    /// For threads that have nobody to tell: ends the process if the list cannot be taken.
    pub fn restrict_or_end(self) {
        if let Err(error) = self.restrict() {
            log::error!("{error}");
            std::process::exit(1);
        }
    }

    fn program(self) -> BpfProgram {
        filter::program(self.lists().iter().copied().flatten().copied(), self.ioctl())
    }

    /// The one ioctl that a role makes, if any.
    fn ioctl(self) -> Option<u32> {
        match self {
            Self::Vcpu => Some(KVM_RUN),
            Self::Sockets => Some(FIONBIO),
            _ => None,
        }
    }

    /// The lists of a role; together they are what its thread may call.
    fn lists(self) -> &'static [&'static [Sysno]] {
        match self {
            Self::Control => &[EVERYONE, MESSAGES, LOOK],
            Self::Vcpu => &[EVERYONE, MESSAGES],
            Self::Files => &[EVERYONE, EVENT_LOOP, LOOK, FILES],
            Self::Sockets => &[EVERYONE, EVENT_LOOP, MESSAGES, STREAMS],
            Self::Console | Self::Entropy | Self::Balloon => &[EVERYONE, EVENT_LOOP],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Role; 7] =
        [Role::Control, Role::Vcpu, Role::Files, Role::Sockets, Role::Console, Role::Entropy, Role::Balloon];

    fn may(role: Role, call: Sysno) -> bool {
        role.lists().iter().any(|list| list.contains(&call))
    }

    #[test]
    fn no_role_can_start_a_program_or_a_process_or_reach_another() {
        use Sysno::*;
        let never = [
            execve,
            execveat,
            fork,
            vfork,
            clone,
            clone3,
            ptrace,
            process_vm_readv,
            process_vm_writev,
            pidfd_open,
            kill,
            mount,
            move_mount,
            open_tree,
            pivot_root,
            chroot,
            unshare,
            setns,
            socket,
            connect,
            bind,
            open_by_handle_at,
            bpf,
            perf_event_open,
            init_module,
            userfaultfd,
            keyctl,
            io_uring_setup,
        ];
        for role in ALL {
            for call in never {
                assert!(!may(role, call), "{role:?} may call {call}");
            }
        }
    }

    #[test]
    fn only_the_files_thread_can_name_a_file() {
        for role in ALL {
            assert_eq!(may(role, Sysno::openat), role == Role::Files, "{role:?}");
        }
    }

    #[test]
    fn every_list_is_a_program_that_the_kernel_takes() {
        for role in ALL {
            let program = role.program();
            assert!(program.len() < 4096, "{role:?}: {} instructions (BPF_MAXINSNS)", program.len());
        }
    }
}
