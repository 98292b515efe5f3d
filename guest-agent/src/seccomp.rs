//! A seccomp profile of the spec, compiled to the kernel's filter program. No C library is involved.
//!
//! Program: refuse foreign architectures; find the system call's number in a binary tree of number ranges; a range
//! ends in a verdict or in a short list of argument checks. A tree and not a list, because the kernel runs the
//! program once for every number when it is installed (to learn which calls are always allowed), and the default
//! profile of Docker has some 350 names: that is a third of a million steps in a list and seven thousand in a tree.
//!
//! As libseccomp and runc do it:
//! - a name that this kernel does not have is no error; rules about it say nothing;
//! - arguments of one rule are joined by "and", but if an index occurs twice, every argument is a rule of its own;
//! - if the default is an error, then numbers beyond the newest one named in the profile give ENOSYS, so that C
//!   libraries fall back to older calls (a profile cannot know calls that came after it).
//!
//! Refused: SCMP_ACT_NOTIFY (its listener would be a host socket).

use std::collections::BTreeMap;

use libc::{BPF_ABS, BPF_ALU, BPF_AND, BPF_JA, BPF_JEQ, BPF_JGE, BPF_JGT, BPF_JMP, BPF_K, BPF_LD, BPF_RET, BPF_W};
use libc::{SECCOMP_RET_ERRNO, SECCOMP_RET_KILL_PROCESS, sock_filter};
use oci_spec::runtime::{
    LinuxSeccomp, LinuxSeccompAction, LinuxSeccompArg, LinuxSeccompFilterFlag, LinuxSeccompOperator, LinuxSyscall,
};

use crate::syscall_table::SYSCALLS;

/// From linux/audit.h.
const AUDIT_ARCH_X86_64: u32 = 0xc000_003e;
/// Offsets in struct seccomp_data.
const NUMBER: u32 = 0;
const ARCH: u32 = 4;
const ARGS: u32 = 16;
/// The program length that the kernel accepts.
const MAX_PROGRAM: usize = 4096;

/// A program and the flags to install it with.
#[derive(Debug)]
pub struct Filter {
    /// Checked by the kernel again.
    pub program: Vec<sock_filter>,
    /// SECCOMP_FILTER_FLAG_*.
    pub flags: u64,
}

/// Why a profile cannot be compiled.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The action asks a process outside of the guest.
    #[error("the seccomp profile uses SCMP_ACT_NOTIFY, which needs a listener on the host: remove it from the profile")]
    Notify,
    /// An argument index above 5.
    #[error("the seccomp profile checks argument {0} of a system call: there are only 0 to 5")]
    Argument(usize),
    /// More than the kernel accepts.
    #[error(
        "the seccomp profile compiles to {0} instructions, the kernel accepts {MAX_PROGRAM}: use fewer argument rules"
    )]
    TooLong(usize),
}

/// What happens to one system call: argument rules in order, then the verdict.
#[derive(Clone, Debug, Default, PartialEq)]
struct Outcome {
    rules: Vec<(Vec<LinuxSeccompArg>, u32)>,
    verdict: Option<u32>,
}

/// Compiles `profile`.
pub fn compile(profile: &LinuxSeccomp) -> Result<Filter, Error> {
    let default = verdict(profile.default_action(), profile.default_errno_ret())?;
    let mut outcomes: BTreeMap<u32, Outcome> = BTreeMap::new();
    for rule in profile.syscalls().iter().flatten() {
        add_rule(&mut outcomes, rule)?;
    }
    let newest = outcomes.keys().next_back().copied().unwrap_or(0);
    let beyond = match profile.default_action() {
        LinuxSeccompAction::ScmpActErrno => SECCOMP_RET_ERRNO | libc::ENOSYS as u32,
        _ => default,
    };
    let mut program =
        vec![load(ARCH), jump(BPF_JEQ, AUDIT_ARCH_X86_64, 1, 0), give(SECCOMP_RET_KILL_PROCESS), load(NUMBER)];
    emit_tree(&mut program, &ranges(&outcomes, default, newest, beyond), default);
    if program.len() > MAX_PROGRAM {
        return Err(Error::TooLong(program.len()));
    }
    Ok(Filter { program, flags: flags(profile) })
}

fn flags(profile: &LinuxSeccomp) -> u64 {
    let bit = |flag: &LinuxSeccompFilterFlag| match flag {
        LinuxSeccompFilterFlag::SeccompFilterFlagLog => libc::SECCOMP_FILTER_FLAG_LOG,
        LinuxSeccompFilterFlag::SeccompFilterFlagSpecAllow => libc::SECCOMP_FILTER_FLAG_SPEC_ALLOW,
        // One thread: nothing to synchronise. No listener: nothing to wait for.
        _ => 0,
    };
    profile.flags().iter().flatten().map(bit).fold(0, |all, bit| all | bit)
}

fn verdict(action: LinuxSeccompAction, errno: Option<u32>) -> Result<u32, Error> {
    match action {
        LinuxSeccompAction::ScmpActNotify => Err(Error::Notify),
        action => Ok(action.as_u32(errno.map(|errno| errno & 0xffff))),
    }
}

fn add_rule(outcomes: &mut BTreeMap<u32, Outcome>, rule: &LinuxSyscall) -> Result<(), Error> {
    let verdict = verdict(rule.action(), rule.errno_ret())?;
    let args = rule.args().clone().unwrap_or_default();
    if let Some(arg) = args.iter().find(|arg| arg.index() > 5) {
        return Err(Error::Argument(arg.index()));
    }
    let twice = (0..6).any(|index| args.iter().filter(|arg| arg.index() == index).count() > 1);
    let numbers =
        rule.names().iter().filter_map(|name| SYSCALLS.binary_search_by_key(&name.as_str(), |entry| entry.0).ok());
    for number in numbers.map(|at| SYSCALLS[at].1) {
        let outcome = outcomes.entry(number).or_default();
        match (args.is_empty(), twice) {
            (true, _) => outcome.verdict = outcome.verdict.or(Some(verdict)),
            (false, false) => outcome.rules.push((args.clone(), verdict)),
            (false, true) => outcome.rules.extend(args.iter().map(|arg| (vec![*arg], verdict))),
        }
    }
    Ok(())
}

/// Ranges by their first number, neighbours with the same outcome merged.
fn ranges(outcomes: &BTreeMap<u32, Outcome>, default: u32, newest: u32, beyond: u32) -> Vec<(u32, Outcome)> {
    let simple = |verdict| Outcome { rules: Vec::new(), verdict: Some(verdict) };
    let mut list: Vec<(u32, Outcome)> = Vec::new();
    for number in 0..=newest + 1 {
        let outcome = match outcomes.get(&number) {
            Some(outcome) => outcome.clone(),
            None if number > newest => simple(beyond),
            None => simple(default),
        };
        if list.last().is_none_or(|(_, last)| *last != outcome) {
            list.push((number, outcome));
        }
    }
    list
}

/// Code that expects the number in the accumulator; `ranges` is not empty.
fn emit_tree(program: &mut Vec<sock_filter>, ranges: &[(u32, Outcome)], default: u32) {
    if let [(_, outcome)] = ranges {
        return emit_outcome(program, outcome, default);
    }
    let (left, right) = ranges.split_at(ranges.len() / 2);
    let first_right = right.first().map_or(u32::MAX, |range| range.0);
    // The conditional jump reaches 255 instructions only, the unconditional one any.
    program.push(jump(BPF_JGE, first_right, 0, 1));
    let to_right = program.len();
    program.push(step(BPF_JMP | BPF_JA, 0));
    emit_tree(program, left, default);
    program[to_right].k = (program.len() - to_right - 1) as u32;
    emit_tree(program, right, default);
}

fn emit_outcome(program: &mut Vec<sock_filter>, outcome: &Outcome, default: u32) {
    for (args, verdict) in &outcome.rules {
        let checks: Vec<_> = args.iter().map(check).collect();
        let mut left: usize = checks.iter().map(Vec::len).sum::<usize>() + 1;
        for check in checks {
            // A check ends by falling through; its failure leaves the whole rule.
            left -= check.len();
            let len = check.len();
            for (at, (mut step, fails)) in check.into_iter().enumerate() {
                let leave = (len - at - 1 + left) as u8;
                match fails {
                    Fails::Never => {}
                    Fails::IfFalse => step.jf = leave,
                    Fails::IfTrue => step.jt = leave,
                }
                program.push(step);
            }
        }
        program.push(give(*verdict));
    }
    program.push(give(outcome.verdict.unwrap_or(default)));
}

/// Which branch of a step means that the check has failed.
enum Fails {
    Never,
    IfTrue,
    IfFalse,
}

/// The 64-bit comparison of one argument in 32-bit steps: high half, then low half.
fn check(arg: &LinuxSeccompArg) -> Vec<(sock_filter, Fails)> {
    use Fails::{IfFalse, IfTrue, Never};
    use LinuxSeccompOperator as Op;
    let low = ARGS + 8 * arg.index() as u32;
    let high = low + 4;
    let halves = |value: u64| ((value >> 32) as u32, value as u32);
    let (value_high, value_low) = halves(arg.value());
    // A comparison whose high half decides jumps over the rest: `jt` (or `jf`) = number of steps to the end.
    match arg.op() {
        Op::ScmpCmpEq => vec![
            (load(high), Never),
            (jump(BPF_JEQ, value_high, 0, 0), IfFalse),
            (load(low), Never),
            (jump(BPF_JEQ, value_low, 0, 0), IfFalse),
        ],
        Op::ScmpCmpNe => vec![
            (load(high), Never),
            (jump(BPF_JEQ, value_high, 0, 2), Never),
            (load(low), Never),
            (jump(BPF_JEQ, value_low, 0, 0), IfTrue),
        ],
        Op::ScmpCmpMaskedEq => {
            let (want_high, want_low) = halves(arg.value_two().unwrap_or(0));
            vec![
                (load(high), Never),
                (step(BPF_ALU | BPF_AND | BPF_K, value_high), Never),
                (jump(BPF_JEQ, want_high, 0, 0), IfFalse),
                (load(low), Never),
                (step(BPF_ALU | BPF_AND | BPF_K, value_low), Never),
                (jump(BPF_JEQ, want_low, 0, 0), IfFalse),
            ]
        }
        Op::ScmpCmpGt | Op::ScmpCmpGe => {
            let last = if arg.op() == Op::ScmpCmpGt { BPF_JGT } else { BPF_JGE };
            vec![
                (load(high), Never),
                (jump(BPF_JGT, value_high, 3, 0), Never),
                (jump(BPF_JEQ, value_high, 0, 0), IfFalse),
                (load(low), Never),
                (jump(last, value_low, 0, 0), IfFalse),
            ]
        }
        Op::ScmpCmpLt | Op::ScmpCmpLe => {
            let last = if arg.op() == Op::ScmpCmpLt { BPF_JGE } else { BPF_JGT };
            vec![
                (load(high), Never),
                (jump(BPF_JGT, value_high, 0, 0), IfTrue),
                (jump(BPF_JEQ, value_high, 0, 2), Never),
                (load(low), Never),
                (jump(last, value_low, 0, 0), IfTrue),
            ]
        }
    }
}

fn step(code: u32, k: u32) -> sock_filter {
    sock_filter { code: code as u16, jt: 0, jf: 0, k }
}

fn load(offset: u32) -> sock_filter {
    step(BPF_LD | BPF_W | BPF_ABS, offset)
}

fn jump(test: u32, k: u32, jt: u8, jf: u8) -> sock_filter {
    sock_filter { code: (BPF_JMP | test | BPF_K) as u16, jt, jf, k }
}

fn give(verdict: u32) -> sock_filter {
    step(BPF_RET | BPF_K, verdict)
}

#[cfg(test)]
mod tests {
    use libc::{SECCOMP_RET_ALLOW, SYS_clone3, SYS_mseal, SYS_personality, SYS_read, SYS_reboot, SYS_socket};

    use super::*;

    /// What the kernel would answer.
    fn run(filter: &Filter, number: i64, args: [u64; 6]) -> u32 {
        let (mut at, mut acc) = (0usize, 0u32);
        for _ in 0..MAX_PROGRAM {
            let step = filter.program[at];
            let code = u32::from(step.code);
            at += 1;
            let test = match code {
                c if c == BPF_RET | BPF_K => return step.k,
                c if c == BPF_LD | BPF_W | BPF_ABS => {
                    acc = match step.k {
                        NUMBER => number as u32,
                        ARCH => AUDIT_ARCH_X86_64,
                        k => (args[((k - ARGS) / 8) as usize] >> (((k - ARGS) % 8) * 8)) as u32,
                    };
                    continue;
                }
                c if c == BPF_ALU | BPF_AND | BPF_K => {
                    acc &= step.k;
                    continue;
                }
                c if c == BPF_JMP | BPF_JA => {
                    at += step.k as usize;
                    continue;
                }
                c if c == BPF_JMP | BPF_JEQ | BPF_K => acc == step.k,
                c if c == BPF_JMP | BPF_JGT | BPF_K => acc > step.k,
                c if c == BPF_JMP | BPF_JGE | BPF_K => acc >= step.k,
                c => panic!("unknown code {c}"),
            };
            at += usize::from(if test { step.jt } else { step.jf });
        }
        panic!("the program does not end")
    }

    fn filter(syscalls: &str) -> Filter {
        let json = format!(r#"{{"defaultAction":"SCMP_ACT_ERRNO","defaultErrnoRet":1,"syscalls":{syscalls}}}"#);
        compile(&serde_json::from_str(&json).expect("profile")).expect("compiles")
    }

    #[test]
    fn named_calls_are_allowed_others_get_the_default_and_unknown_new_ones_enosys() {
        let f = filter(r#"[{"names":["read","write","personality","no_such_call"],"action":"SCMP_ACT_ALLOW"}]"#);
        assert_eq!(run(&f, SYS_read, [0; 6]), SECCOMP_RET_ALLOW);
        assert_eq!(run(&f, 2, [0; 6]), SECCOMP_RET_ERRNO | 1);
        assert_eq!(run(&f, SYS_reboot, [0; 6]), SECCOMP_RET_ERRNO | libc::ENOSYS as u32);
        assert_eq!(run(&f, SYS_mseal, [0; 6]), SECCOMP_RET_ERRNO | libc::ENOSYS as u32);
        assert_eq!(run(&f, 0x4000_0000, [0; 6]), SECCOMP_RET_ERRNO | libc::ENOSYS as u32);
    }

    #[test]
    fn a_rule_may_have_its_own_errno() {
        let f = filter(
            r#"[{"names":["clone3"],"action":"SCMP_ACT_ERRNO","errnoRet":38},{"names":["mseal"],"action":"SCMP_ACT_ALLOW"}]"#,
        );
        assert_eq!(run(&f, SYS_clone3, [0; 6]), SECCOMP_RET_ERRNO | 38);
    }

    #[test]
    fn every_operator_compares_all_64_bits() {
        let big = 5u64 << 32 | 7;
        let cases: [(&str, [u64; 2], [u64; 2]); 6] = [
            ("EQ", [big, big], [big + (1 << 32), big + 1]),
            ("NE", [big + (1 << 32), big + 1], [big, big]),
            ("GT", [big + 1, 6 << 32], [big, 4 << 32 | 9]),
            ("GE", [big, 6 << 32], [big - 1, 4 << 32 | 9]),
            ("LT", [big - 1, 4 << 32 | 9], [big, 6 << 32]),
            ("LE", [big, 4 << 32 | 9], [big + 1, 6 << 32]),
        ];
        for (op, pass, fail) in cases {
            let f = filter(&format!(
                r#"[{{"names":["socket"],"action":"SCMP_ACT_ALLOW","args":[{{"index":1,"value":{big},"op":"SCMP_CMP_{op}"}}]}}]"#
            ));
            for value in pass {
                assert_eq!(run(&f, SYS_socket, [0, value, 0, 0, 0, 0]), SECCOMP_RET_ALLOW, "{op} {value:#x}");
            }
            for value in fail {
                assert_eq!(run(&f, SYS_socket, [0, value, 0, 0, 0, 0]), SECCOMP_RET_ERRNO | 1, "{op} {value:#x}");
            }
        }
    }

    #[test]
    fn a_masked_comparison_ignores_the_other_bits() {
        let f = filter(
            r#"[{"names":["socket"],"action":"SCMP_ACT_ALLOW","args":[{"index":0,"value":2114060288,"valueTwo":0,"op":"SCMP_CMP_MASKED_EQ"}]}]"#,
        );
        assert_eq!(run(&f, SYS_socket, [0x11, 0, 0, 0, 0, 0]), SECCOMP_RET_ALLOW);
        assert_eq!(run(&f, SYS_socket, [0x1000_0000, 0, 0, 0, 0, 0]), SECCOMP_RET_ERRNO | 1);
    }

    #[test]
    fn arguments_are_joined_by_and_unless_an_index_occurs_twice() {
        let arg = |index: u32, value: u32| format!(r#"{{"index":{index},"value":{value},"op":"SCMP_CMP_EQ"}}"#);
        let rule = |a: String, b: String| {
            filter(&format!(r#"[{{"names":["personality"],"action":"SCMP_ACT_ALLOW","args":[{a},{b}]}}]"#))
        };
        let both = rule(arg(0, 1), arg(1, 2));
        assert_eq!(run(&both, SYS_personality, [1, 2, 0, 0, 0, 0]), SECCOMP_RET_ALLOW);
        assert_eq!(run(&both, SYS_personality, [1, 3, 0, 0, 0, 0]), SECCOMP_RET_ERRNO | 1);
        let either = rule(arg(0, 1), arg(0, 2));
        assert_eq!(run(&either, SYS_personality, [2, 0, 0, 0, 0, 0]), SECCOMP_RET_ALLOW);
        assert_eq!(run(&either, SYS_personality, [3, 0, 0, 0, 0, 0]), SECCOMP_RET_ERRNO | 1);
    }

    #[test]
    fn the_table_is_sorted_so_that_it_can_be_searched() {
        assert!(SYSCALLS.is_sorted_by(|a, b| a.0 < b.0));
    }

    #[test]
    fn a_listener_on_the_host_is_refused() {
        let json = r#"{"defaultAction":"SCMP_ACT_ALLOW","syscalls":[{"names":["mount"],"action":"SCMP_ACT_NOTIFY"}]}"#;
        assert!(matches!(compile(&serde_json::from_str(json).expect("profile")), Err(Error::Notify)));
    }
}
