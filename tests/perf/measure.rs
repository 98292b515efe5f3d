//! The half in the lab: runs every contender several times in one boot and keeps the counted time of each run.

use std::{collections::BTreeMap, env, fs, time::Duration};

use serde::{Deserialize, Serialize};

use crate::{contender, phases, phases::Phases};

/// Runs that are not counted: caches fill.
const WARM_UP: usize = 2;

/// Runs that are.
const ROUNDS: usize = 5;

/// What one boot of the lab measured.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Measured {
    /// Whole runs in nanoseconds, by contender, in the order in which they ran.
    pub runs: BTreeMap<String, Vec<u64>>,
    /// Phases of the run of nacre with the median length.
    pub phases: Phases,
}

impl Measured {
    /// The median of a contender's runs in nanoseconds.
    pub fn median(&self, name: &str) -> Option<u64> {
        let mut runs = self.runs.get(name)?.clone();
        runs.sort_unstable();
        runs.get(runs.len() / 2).copied()
    }
}

/// Measures and writes the figures to `out`.
pub fn to_file(out: &str) -> Result<(), String> {
    let trace = env::var("NACRE_TRACE").map_err(|_| "set NACRE_TRACE, here and for containerd, to a file")?;
    let mut runs = BTreeMap::new();
    let mut ours = Vec::new();
    for contender in &contender::ALL {
        let mut lengths = Vec::new();
        for round in 0..WARM_UP + ROUNDS {
            let id = format!("{}-{round}", contender.name);
            let begin = now();
            contender.run(&id)?;
            let end = now();
            println!("{}: {:.1} ms", contender.name, (end - begin) as f64 / 1e6);
            if round >= WARM_UP {
                lengths.push(end - begin);
                ours.push((end - begin, id, begin, end));
            }
        }
        runs.insert(contender.name.to_owned(), lengths);
    }
    ours.truncate(ROUNDS);
    ours.sort_unstable();
    let (_, id, begin, end) = &ours[ROUNDS / 2];
    let measured = Measured { runs, phases: phases::of(&trace, id, *begin, *end)? };
    let text = serde_json::to_string_pretty(&measured).map_err(|error| error.to_string())?;
    fs::write(out, text).map_err(|error| format!("cannot write {out}: {error}"))
}

/// CLOCK_MONOTONIC in nanoseconds: in a counted lab, instructions.
fn now() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let since_boot = Duration::new(now.tv_sec.unsigned_abs(), now.tv_nsec as u32);
    since_boot.as_nanos() as u64
}
