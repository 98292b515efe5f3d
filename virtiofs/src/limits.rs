//! What a guest may make this process hold. Every table that a guest can fill is here, with the reason for its size.

use rustix::process::{Resource, getrlimit};

/// Descriptors left to the rest of the process, and to the operations that recover from having none (a walk needs
/// two at a time on each thread).
const RESERVE: usize = 128;

/// Limits of one [`ShareTree`](crate::ShareTree).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Descriptors kept only for speed. 1024: the directories and files that a build touches over and over fit, and
    /// what they pin of the host's memory (about 1 KiB each) does not show.
    pub cached_fds: usize,
    /// Nodes, that is, files that the guest's kernel holds in its caches. Beyond it lookups are ENFILE and listings
    /// carry on without attributes. Two million: a node costs about 350 bytes here and 1 KiB of its own memory in
    /// the guest, so that a guest pays for it first, and less than 700 MB are at stake.
    pub nodes: usize,
    /// Open files and directories. Beyond it an open is ENFILE. 65,536: above what servers with many connections
    /// open on disk, and within a descriptor limit that the host can grant.
    pub handles: usize,
    /// Files without a name that the guest still holds. Beyond it an unlink goes on to succeed, and the file is
    /// ESTALE to whoever holds it without having it open.
    pub orphans: usize,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { cached_fds: 1024, nodes: 2 << 20, handles: 65_536, orphans: 4096 }
    }
}

impl Limits {
    /// These limits, lowered to what the process may open: a limit that the kernel reaches first protects nobody.
    pub(crate) fn within_process(self) -> Limits {
        let allowed = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        self.within(usize::try_from(allowed).unwrap_or(usize::MAX))
    }

    fn within(self, descriptors: usize) -> Limits {
        let usable = descriptors.saturating_sub(RESERVE.min(descriptors / 4));
        Limits {
            cached_fds: self.cached_fds.min(usable / 4).max(1),
            orphans: self.orphans.min(usable / 4),
            handles: self.handles.min(usable / 2),
            nodes: self.nodes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn together_the_limits_stay_below_what_the_process_may_open() {
        for descriptors in [16, 256, 1024, 65_536, 1 << 20] {
            let limits = Limits::default().within(descriptors);
            let sum = limits.cached_fds + limits.orphans + limits.handles;
            assert!(sum < descriptors, "{sum} of {descriptors}");
        }
    }

    #[test]
    fn limits_that_the_process_can_keep_are_left_alone() {
        assert_eq!(Limits::default().within(1 << 20), Limits::default());
    }
}
