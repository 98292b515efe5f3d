//! The half in the lab: runs every contender several times in one boot and keeps the counted time of each run.

use std::{collections::BTreeMap, env, fs, time::Duration};

use serde::{Deserialize, Serialize};

use crate::{contender, contender::Contender, phases, phases::Phases};

/// Runs that are not counted: caches fill.
const WARM_UP: usize = 2;

/// Runs of ours that are.
const ROUNDS: usize = 12;

/// Runs of a peer that are: about one in five of runc's is placed as well as it can be, and is the unit of all.
const PEER_ROUNDS: usize = 10;

/// What one boot of the lab measured.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Measured {
    /// Whole runs in nanoseconds, by contender, in the order in which they ran.
    pub runs: BTreeMap<String, Vec<u64>>,
    /// Phases of each run of nacre, in the order in which they ran.
    pub phases: Vec<Phases>,
}

impl Measured {
    /// A contender's shortest run in nanoseconds. What differs from run to run is how Go's scheduler places the work of
    /// ctr and containerd, often by twenty virtual ms at once, and it only ever adds: the shortest run is the work itself.
    pub fn least(&self, name: &str) -> Option<u64> {
        self.runs.get(name)?.iter().min().copied()
    }

    /// What a boot says of a contender, in nanoseconds: of ours, all phases at their shortest; of a peer, which leaves no
    /// stamps, the shortest run.
    pub fn figure(&self, contender: &Contender) -> Option<u64> {
        if contender.ours() { Some(self.floor()?.whole()) } else { self.least(contender.name) }
    }

    /// Nacre's phases, each at its shortest.
    pub fn floor(&self) -> Option<Phases> {
        Phases::floor(&self.phases)
    }
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

/// Measures the contenders of these names, or all, and writes the figures to `out`.
pub fn to_file(out: &str, names: &[&str]) -> Result<(), String> {
    let trace = env::var("NACRE_TRACE").map_err(|_| "set NACRE_TRACE, here and for containerd, to a file")?;
    let mut runs = BTreeMap::new();
    let mut phases = Vec::new();
    for contender in contender::ALL.iter().filter(|one| names.is_empty() || names.contains(&one.name)) {
        let rounds = rounds(contender)?;
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

/// Runs one contender until enough runs are counted. A failure of a peer is said, and tried again; we may not fail.
fn rounds(contender: &Contender) -> Result<Vec<Run>, String> {
    let (wanted, may_fail) = if contender.ours() { (ROUNDS, 0) } else { (PEER_ROUNDS, FORGIVEN) };
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
    fn figure_is_the_phases_floor_for_us_and_the_shortest_run_for_a_peer() {
        let run = |lengths: [u64; 2]| Phases(vec![("a".to_owned(), lengths[0]), ("b".to_owned(), lengths[1])]);
        let runs = [("nacre".to_owned(), vec![8, 5]), ("runc".to_owned(), vec![9, 7])];
        let boot = Measured { runs: runs.into(), phases: vec![run([3, 5]), run([4, 1])] };
        let figures = contender::ALL.iter().filter_map(|one| boot.figure(one));
        assert_eq!(figures.collect::<Vec<_>>(), [4, 7]);
    }
}
