//! A list of system calls as a program for seccomp (Documentation/userspace-api/seccomp_filter.rst).
//!
//! ```text
//!   architecture is x86_64?  no ─► kill        number: a search tree over intervals, each with one answer
//! ```
//!
//! A tree, not one comparison a call, which is what seccompiler makes: when a thread takes its list, the kernel runs the
//! program once for each of its 460 calls, to know whose answer may be cached (`seccomp_cache_prepare` in
//! kernel/seccomp.c), and translates it. Seven threads do that at every start, and took 3 to 6 virtual ms from their birth to
//! the last list; what the tree spares of these was not told from the noise between boots.
//!
//! Invariants: every path ends in an answer, jumps only go forward, and numbers of the x32 ABI, which lie above all
//! others, are in the last interval, which is never allowed.

use seccompiler::{BpfProgram, sock_filter};
use syscalls::Sysno;

/// Answers (linux/seccomp.h).
const KILL_PROCESS: u32 = 0x8000_0000;
const TRAP: u32 = 0x0003_0000;
const ALLOW: u32 = 0x7fff_0000;

/// `AUDIT_ARCH_X86_64` (linux/audit.h).
const X86_64: u32 = 0xc000_003e;

/// Where things lie in `struct seccomp_data`: number, architecture, and the low half of the second argument.
const NUMBER: u32 = 0;
const ARCHITECTURE: u32 = 4;
const SECOND_ARGUMENT: u32 = 24;

/// Instructions (linux/bpf_common.h): BPF_LD|BPF_W|BPF_ABS, BPF_JMP|BPF_JEQ|BPF_K, BPF_JMP|BPF_JGE|BPF_K, BPF_RET|BPF_K.
const LOAD: u16 = 0x20;
const JUMP_IF_EQUAL: u16 = 0x15;
const JUMP_IF_AT_LEAST: u16 = 0x35;
const RETURN: u16 = 0x06;

/// What becomes of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Answer {
    Trap,
    Allow,
    /// Allowed if the second argument is this one.
    AllowWith(u32),
}

/// Numbers from here on, up to where the next interval begins.
type Interval = (u32, Answer);

/// The program that allows `calls`, and `ioctl` with one request; all others raise SIGSYS.
pub fn program(calls: impl Iterator<Item = Sysno>, ioctl: Option<u32>) -> BpfProgram {
    let mut allowed: Vec<Interval> = calls.map(|call| (call as u32, Answer::Allow)).collect();
    allowed.extend(ioctl.map(|request| (Sysno::ioctl as u32, Answer::AllowWith(request))));
    allowed.sort_by_key(|(number, _)| *number);
    allowed.dedup();
    let mut program = vec![
        instruction(LOAD, ARCHITECTURE),
        jump(JUMP_IF_EQUAL, X86_64, 1, 0),
        instruction(RETURN, KILL_PROCESS),
        instruction(LOAD, NUMBER),
    ];
    program.extend(search(&intervals(&allowed)));
    program
}

/// All numbers from 0 on, from those that are allowed, in ascending order.
fn intervals(allowed: &[Interval]) -> Vec<Interval> {
    let mut all = Vec::new();
    // Where the numbers begin that have no answer yet.
    let mut open = 0;
    for &(number, answer) in allowed {
        assert!(number >= open, "call {number} has one answer");
        if number > open {
            all.push((open, Answer::Trap));
        }
        all.push((number, answer));
        open = number + 1;
    }
    all.push((open, Answer::Trap));
    all.dedup_by(|next, before| next.1 == before.1);
    all
}

/// Finds the interval of the number in the accumulator.
fn search(intervals: &[Interval]) -> BpfProgram {
    if let [(_, answer)] = intervals {
        return leaf(*answer);
    }
    let (low, high) = intervals.split_at(intervals.len() / 2);
    let (below, above) = (search(low), search(high));
    let over = u8::try_from(below.len()).expect("half of a list is less than 255 instructions");
    [vec![jump(JUMP_IF_AT_LEAST, high[0].0, over, 0)], below, above].concat()
}

fn leaf(answer: Answer) -> BpfProgram {
    match answer {
        Answer::Trap => vec![instruction(RETURN, TRAP)],
        Answer::Allow => vec![instruction(RETURN, ALLOW)],
        Answer::AllowWith(argument) => vec![
            instruction(LOAD, SECOND_ARGUMENT),
            jump(JUMP_IF_EQUAL, argument, 0, 1),
            instruction(RETURN, ALLOW),
            instruction(RETURN, TRAP),
        ],
    }
}

fn instruction(code: u16, k: u32) -> sock_filter {
    sock_filter { code, jt: 0, jf: 0, k }
}

fn jump(code: u16, k: u32, jt: u8, jf: u8) -> sock_filter {
    sock_filter { code, jt, jf, k }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the kernel would answer; also how many instructions it took.
    fn run(program: &[sock_filter], architecture: u32, number: u32, argument: u32) -> (u32, usize) {
        let (mut at, mut accumulator, mut steps) = (0, 0, 0);
        loop {
            let one = &program[at];
            steps += 1;
            at += 1;
            let jump = |taken: bool| usize::from(if taken { one.jt } else { one.jf });
            match (one.code, one.k) {
                (RETURN, answer) => return (answer, steps),
                (LOAD, NUMBER) => accumulator = number,
                (LOAD, ARCHITECTURE) => accumulator = architecture,
                (LOAD, SECOND_ARGUMENT) => accumulator = argument,
                (JUMP_IF_EQUAL, k) => at += jump(accumulator == k),
                (JUMP_IF_AT_LEAST, k) => at += jump(accumulator >= k),
                other => panic!("not an instruction: {other:?}"),
            }
        }
    }

    /// Neighbours, the first number, one far away.
    const CALLS: [Sysno; 6] =
        [Sysno::write, Sysno::read, Sysno::close, Sysno::futex, Sysno::exit_group, Sysno::openat2];

    #[test]
    fn calls_of_the_list_are_allowed_and_all_others_trap() {
        for program in [program(CALLS.into_iter(), None), program(CALLS.into_iter().chain(CALLS), None)] {
            for number in (0..1000).chain([0x4000_0000, 0x4000_0001, u32::MAX]) {
                let expected = if CALLS.iter().any(|call| *call as u32 == number) { ALLOW } else { TRAP };
                assert_eq!(run(&program, X86_64, number, 0).0, expected, "{number}");
            }
        }
    }

    #[test]
    fn ioctl_is_allowed_with_its_one_request() {
        let program = program(CALLS.into_iter(), Some(0xae80));
        let ioctl = Sysno::ioctl as u32;
        assert_eq!([0xae80, 0, 0xae81].map(|request| run(&program, X86_64, ioctl, request).0), [ALLOW, TRAP, TRAP]);
        assert_eq!(run(&program, X86_64, Sysno::read as u32, 0).0, ALLOW);
    }

    #[test]
    fn other_architectures_end_the_process() {
        assert_eq!(run(&program(CALLS.into_iter(), None), 0x4000_0003, Sysno::read as u32, 0).0, KILL_PROCESS);
    }

    #[test]
    fn search_takes_as_many_steps_as_a_tree_is_deep() {
        let every_third = (0..300).step_by(3).filter_map(Sysno::new);
        let program = program(every_third, None);
        let worst = (0..500).map(|number| run(&program, X86_64, number, 0).1).max();
        assert!(worst <= Some(4 + 9), "{worst:?}");
    }
}
