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
