//! The half in the lab: runs every contender several times in one boot and keeps the counted time of each run.

use std::{collections::BTreeMap, env, fs, time::Duration};

use serde::{Deserialize, Serialize};

use crate::{contender, contender::Contender, phases, phases::Phases};

/// Runs that are not counted: caches fill.
const WARM_UP: usize = 2;

/// What one boot of the lab measured.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Measured {
    /// Whole runs in nanoseconds, by contender, in the order in which they ran.
    pub runs: BTreeMap<String, Vec<u64>>,
    /// Phases of each run of nacre, in the order in which they ran.
    pub phases: Vec<Phases>,
}

impl Measured {
    /// A contender's middle run in nanoseconds. Runs differ by how Go's scheduler places the work of ctr and containerd, a
    /// per cent or two either way.
    pub fn middle(&self, name: &str) -> Option<u64> {
        middle(self.runs.get(name)?.iter().copied())
    }

    /// Nacre's phases, each as long as in the middle.
    pub fn phases(&self) -> Option<Phases> {
        Phases::middle(&self.phases)
    }
}

/// The middle one of some figures, the lower of two.
pub fn middle(figures: impl Iterator<Item = u64>) -> Option<u64> {
    let mut sorted: Vec<u64> = figures.collect();
    sorted.sort_unstable();
    sorted.get(sorted.len().saturating_sub(1) / 2).copied()
}

/// One run of a contender.
struct Run {
    id: String,
    /// CLOCK_MONOTONIC in nanoseconds, before and after.
    begin: u64,
    end: u64,
}

impl Run {
    fn length(&self) -> u64 {
        self.end - self.begin
    }
}

/// Counts `wanted` runs, or as many times as it takes, of each contender of these names, or of all, and writes the figures to `out`.
pub fn to_file(out: &str, wanted: usize, names: &[&str]) -> Result<(), String> {
    let trace = env::var("NACRE_TRACE").map_err(|_| "set NACRE_TRACE, here and for containerd, to a file")?;
    let mut runs = BTreeMap::new();
    let mut phases = Vec::new();
    for contender in contender::ALL.iter().filter(|one| names.is_empty() || names.contains(&one.name)) {
        let rounds = rounds(contender, wanted * contender.times)?;
        if contender.ours() {
            phases =
                rounds.iter().map(|run| phases::of(&trace, &run.id, run.begin, run.end)).collect::<Result<_, _>>()?;
        }
        runs.insert(contender.name.to_owned(), rounds.iter().map(Run::length).collect());
    }
    let text = serde_json::to_string_pretty(&Measured { runs, phases }).map_err(|error| error.to_string())?;
    fs::write(out, text).map_err(|error| format!("cannot write {out}: {error}"))
}

/// How many failures a peer is forgiven: pVisor's own start-up time-out is close to what emulation takes.
const FORGIVEN: usize = 5;

/// Runs one contender until `wanted` runs are counted. A failure of a peer is said, and tried again; we may not fail.
fn rounds(contender: &Contender, wanted: usize) -> Result<Vec<Run>, String> {
    let may_fail = if contender.ours() { 0 } else { FORGIVEN };
    let (mut counted, mut round, mut failures) = (Vec::new(), 0, 0);
    while counted.len() < wanted {
        let id = format!("{}-{round}-{failures}", contender.name);
        let begin = now();
        match contender.run(&id) {
            Err(failure) if failures < may_fail => {
                println!("{}: failed and is tried once more: {failure}", contender.name);
                failures += 1;
                continue;
            }
            ended => ended?,
        }
        let run = Run { id, begin, end: now() };
        println!("{}: {:.1} ms", contender.name, run.length() as f64 / 1e6);
        if round >= WARM_UP {
            counted.push(run);
        }
        round += 1;
    }
    Ok(counted)
}

/// CLOCK_MONOTONIC in nanoseconds: in a counted lab, instructions.
fn now() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let since_boot = Duration::new(now.tv_sec.unsigned_abs(), now.tv_nsec as u32);
    since_boot.as_nanos() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn middle_of_two_is_the_lower_and_of_none_nothing() {
        assert_eq!(middle([9, 1, 5].into_iter()), Some(5));
        assert_eq!(middle([9, 1, 5, 7].into_iter()), Some(5));
        assert_eq!(middle([].into_iter()), None);
    }
}
