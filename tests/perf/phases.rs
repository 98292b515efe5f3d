//! The phases of one start under nacre, from the stamps that shim and VMM leave in the trace file.
//!
//! Each stamp is a line `{"phase": NAME, "id": CONTAINER, "ns": CLOCK_MONOTONIC}`; a phase lasts from the stamp before. The
//! VMM's own says what it has run on the processor by then, too.

use std::{collections::BTreeMap, fs};

use serde::{Deserialize, Serialize};

use crate::{measure::middle, report::ms};

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
    /// Processor time, where the one who stamps knows it.
    cpu_ns: Option<u64>,
}

/// How a start divides.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Phases {
    /// The length of each phase in nanoseconds, in order. The lab has one processor: whoever else runs is in it.
    pub lengths: Vec<(String, u64)>,
    /// What the VMM alone ran on the processor before it first entered the guest, in nanoseconds.
    pub vmm_share: u64,
}

/// Which phases are the machine's: from the shim's order for a VMM to the process's exit as the shim sees it.
const MACHINE: std::ops::Range<usize> = 3..8;

impl Phases {
    /// The machine's phases together, in nanoseconds.
    pub fn machine(&self) -> u64 {
        self.lengths[MACHINE].iter().map(|(_, length)| length).sum()
    }

    /// One line each, and what is in them that is not a phase.
    pub fn print(&self) {
        for (what, length) in &self.lengths {
            println!("{:>9.2}  {what}", ms(*length));
        }
        println!("{:>9.2}  of all this: the VMM's own work before the first KVM_RUN", ms(self.vmm_share));
    }

    /// Each phase as long as in the middle of all runs; nothing, if there was none.
    pub fn middle(runs: &[Phases]) -> Option<Phases> {
        let phase = |index: usize| middle(runs.iter().map(|run| run.lengths[index].1));
        let named = runs.first()?.lengths.iter().enumerate();
        let lengths = named.filter_map(|(index, (what, _))| Some((what.clone(), phase(index)?))).collect();
        Some(Phases { lengths, vmm_share: middle(runs.iter().map(|run| run.vmm_share))? })
    }
}

/// Reads the phases of container `id` that ran from `begin` to `end` (CLOCK_MONOTONIC).
pub fn of(trace: &str, id: &str, begin: u64, end: u64) -> Result<Phases, String> {
    let text = fs::read_to_string(trace).map_err(|error| format!("cannot read the trace {trace}: {error}"))?;
    let (mut stamps, mut vmm_share) = (BTreeMap::new(), None);
    for line in text.lines() {
        let stamp: Stamp = serde_json::from_str(line).map_err(|error| format!("trace line {line:?}: {error}"))?;
        if stamp.id == id {
            vmm_share = vmm_share.or(stamp.cpu_ns);
            stamps.entry(stamp.phase).or_insert(stamp.ns);
        }
    }
    let vmm_share = vmm_share.ok_or_else(|| format!("the trace of {id} does not say what the VMM cost"))?;
    let mut last = begin;
    let mut lengths = Vec::new();
    for (stamp, what) in ORDER {
        let at = *stamps.get(stamp).ok_or_else(|| format!("the trace of {id} lacks {stamp:?}"))?;
        lengths.push((what.to_owned(), at.saturating_sub(last)));
        last = last.max(at);
    }
    lengths.push((REST.to_owned(), end.saturating_sub(last)));
    Ok(Phases { lengths, vmm_share })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_phase_is_taken_from_the_run_that_had_it_in_the_middle() {
        let run = |a, b, vmm_share| Phases { lengths: vec![("a".to_owned(), a), ("b".to_owned(), b)], vmm_share };
        let middle = Phases::middle(&[run(3, 5, 2), run(4, 1, 1), run(9, 2, 3)]).expect("three runs");
        assert_eq!(middle.lengths.iter().map(|(_, length)| *length).collect::<Vec<_>>(), [4, 2]);
        assert_eq!(middle.vmm_share, 2);
        assert!(Phases::middle(&[]).is_none());
    }
}
