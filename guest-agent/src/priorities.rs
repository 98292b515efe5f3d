//! How a container's process stands against others in the guest, in the kernel's numbers: scheduling policy, I/O priority,
//! execution domain. All three survive exec and are inherited.
//!
//! They say nothing of the host: they order what runs in one guest. What the kernel refuses (a deadline that cannot be
//! met, a priority that root of a user namespace may not have) fails the creation of the container.

use oci_spec::runtime::{
    IOPriorityClass, LinuxIOPriority, LinuxPersonality, LinuxPersonalityDomain, LinuxSchedulerFlag,
    LinuxSchedulerPolicy, Scheduler,
};

/// The argument of sched_setattr(2).
pub fn scheduler(written: &Scheduler) -> libc::sched_attr {
    libc::sched_attr {
        size: size_of::<libc::sched_attr>() as u32,
        sched_policy: policy(*written.policy()) as u32,
        sched_flags: written
            .flags()
            .iter()
            .flatten()
            .map(|flag| scheduler_flag(*flag) as u64)
            .fold(0, |all, bit| all | bit),
        sched_nice: written.nice().unwrap_or(0),
        sched_priority: written.priority().unwrap_or(0) as u32,
        sched_runtime: written.runtime().unwrap_or(0),
        sched_deadline: written.deadline().unwrap_or(0),
        sched_period: written.period().unwrap_or(0),
    }
}

fn policy(written: LinuxSchedulerPolicy) -> libc::c_int {
    /// Reserved by the kernel, which has no such policy and says so.
    const SCHED_ISO: libc::c_int = 4;
    match written {
        LinuxSchedulerPolicy::SchedOther => libc::SCHED_OTHER,
        LinuxSchedulerPolicy::SchedFifo => libc::SCHED_FIFO,
        LinuxSchedulerPolicy::SchedRr => libc::SCHED_RR,
        LinuxSchedulerPolicy::SchedBatch => libc::SCHED_BATCH,
        LinuxSchedulerPolicy::SchedIso => SCHED_ISO,
        LinuxSchedulerPolicy::SchedIdle => libc::SCHED_IDLE,
        LinuxSchedulerPolicy::SchedDeadline => libc::SCHED_DEADLINE,
    }
}

fn scheduler_flag(written: LinuxSchedulerFlag) -> libc::c_int {
    match written {
        LinuxSchedulerFlag::SchedResetOnFork => libc::SCHED_FLAG_RESET_ON_FORK,
        LinuxSchedulerFlag::SchedFlagReclaim => libc::SCHED_FLAG_RECLAIM,
        LinuxSchedulerFlag::SchedFlagDLOverrun => libc::SCHED_FLAG_DL_OVERRUN,
        LinuxSchedulerFlag::SchedFlagKeepPolicy => libc::SCHED_FLAG_KEEP_POLICY,
        LinuxSchedulerFlag::SchedFlagKeepParams => libc::SCHED_FLAG_KEEP_PARAMS,
        LinuxSchedulerFlag::SchedFlagUtilClampMin => libc::SCHED_FLAG_UTIL_CLAMP_MIN,
        LinuxSchedulerFlag::SchedFlagUtilClampMax => libc::SCHED_FLAG_UTIL_CLAMP_MAX,
    }
}

/// The argument of ioprio_set(2).
pub fn io(written: &LinuxIOPriority) -> u32 {
    const CLASS_SHIFT: u32 = 13;
    let class: u32 = match written.class() {
        IOPriorityClass::IoprioClassRt => 1,
        IOPriorityClass::IoprioClassBe => 2,
        IOPriorityClass::IoprioClassIdle => 3,
    };
    // A level that has no place beside the class is one that the kernel refuses.
    class << CLASS_SHIFT | u32::try_from(written.priority()).unwrap_or(u32::MAX).min((1 << CLASS_SHIFT) - 1)
}

/// The argument of personality(2). The runtime spec defines no flags yet.
pub fn personality(written: &LinuxPersonality) -> u32 {
    match written.domain() {
        LinuxPersonalityDomain::PerLinux => 0,
        LinuxPersonalityDomain::PerLinux32 => 8,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scheduling_policy_is_the_kernels() {
        let text = r#"{"policy":"SCHED_BATCH","nice":-3,"flags":["SCHED_RESET_ON_FORK","SCHED_FLAG_KEEP_PARAMS"]}"#;
        let got = scheduler(&serde_json::from_str(text).expect("scheduler"));
        assert_eq!((got.sched_policy, got.sched_nice, got.sched_flags, got.size), (3, -3, 0x11, 48));
    }

    #[test]
    fn io_priority_is_class_and_level_in_one_number() {
        let io = |text: &str| io(&serde_json::from_str(text).expect("priority"));
        assert_eq!(io(r#"{"class":"IOPRIO_CLASS_BE","priority":6}"#), 2 << 13 | 6);
        assert_eq!(io(r#"{"class":"IOPRIO_CLASS_IDLE","priority":0}"#), 3 << 13);
    }

    #[test]
    fn personality_is_the_kernels() {
        assert_eq!(personality(&serde_json::from_str(r#"{"domain":"LINUX32"}"#).expect("personality")), 8);
    }
}
