//! The phases of one start under nacre, from the stamps that shim and VMM leave in the trace file.
//!
//! Each stamp is a line `{"phase": NAME, "id": CONTAINER, "ns": CLOCK_MONOTONIC}`; a phase lasts from the stamp before.

use std::{collections::BTreeMap, fs};

use serde::{Deserialize, Serialize};

/// Stamps in the order of a start, each with what the time up to it was spent on.
pub const ORDER: [(&str, &str); 8] = [
    ("shim_start", "ctr and containerd, up to the shim's exec"),
    ("server", "shim start: bootstrap, server process"),
    ("vmm_spawned", "server: settings, VMM process"),
    ("entered", "VMM: memory, kernel, devices, up to the first KVM_RUN"),
    ("agent_ready", "guest kernel and agent"),
    ("created", "Create: root, share, container prepared"),
    ("started", "Start"),
    ("exited", "the process, and its exit seen by the shim"),
];

/// What the time after the last stamp is spent on.
pub const REST: &str = "exit event, Delete, Shutdown, ctr";

#[derive(Debug, Deserialize)]
struct Stamp {
    phase: String,
    id: String,
    ns: u64,
}

/// The length of each phase in nanoseconds, in order.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Phases(pub Vec<(String, u64)>);

/// Which phases are the machine's: from the shim's order for a VMM to the process's exit as the shim sees it.
const MACHINE: std::ops::Range<usize> = 3..8;

impl Phases {
    /// All phases together, in nanoseconds.
    pub fn whole(&self) -> u64 {
        self.0.iter().map(|(_, length)| length).sum()
    }

    /// The machine's phases together, in nanoseconds.
    pub fn machine(&self) -> u64 {
        self.0[MACHINE].iter().map(|(_, length)| length).sum()
    }

    /// Each phase as short as it was in any of the runs; nothing, if there was none.
    pub fn floor(runs: &[Phases]) -> Option<Phases> {
        let mut floor = runs.first()?.clone();
        for run in runs {
            for ((_, least), (_, length)) in floor.0.iter_mut().zip(&run.0) {
                *least = (*least).min(*length);
            }
        }
        Some(floor)
    }
}

/// Reads the phases of container `id` that ran from `begin` to `end` (CLOCK_MONOTONIC).
pub fn of(trace: &str, id: &str, begin: u64, end: u64) -> Result<Phases, String> {
    let text = fs::read_to_string(trace).map_err(|error| format!("cannot read the trace {trace}: {error}"))?;
    let mut stamps = BTreeMap::new();
    for line in text.lines() {
        let stamp: Stamp = serde_json::from_str(line).map_err(|error| format!("trace line {line:?}: {error}"))?;
        if stamp.id == id {
            stamps.entry(stamp.phase).or_insert(stamp.ns);
        }
    }
    let mut last = begin;
    let mut phases = Vec::new();
    for (stamp, what) in ORDER {
        let at = *stamps.get(stamp).ok_or_else(|| format!("the trace of {id} lacks {stamp:?}"))?;
        phases.push((what.to_owned(), at.saturating_sub(last)));
        last = last.max(at);
    }
    phases.push((REST.to_owned(), end.saturating_sub(last)));
    Ok(Phases(phases))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floor_takes_each_phase_from_the_run_that_had_it_shortest() {
        let run = |lengths: [u64; 2]| Phases(vec![("a".to_owned(), lengths[0]), ("b".to_owned(), lengths[1])]);
        assert_eq!(Phases::floor(&[run([3, 5]), run([4, 1])]).map(|floor| floor.whole()), Some(4));
        assert!(Phases::floor(&[]).is_none());
    }
}
