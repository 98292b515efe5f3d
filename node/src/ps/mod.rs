//! `nacre ps`: pods, their VMs and containers, and what they take of the host's memory.
//!
//! Pods are found in two ways that need nobody's answer: by the bundles in containerd's state folders ([`bundles`]), and
//! by the working directories of running shims, which are bundles of daemons whose folders we do not know. What a pod's
//! records say is believed only of processes that started when the record says ([`process`]).

mod bundles;
mod pods;
mod process;

use std::path::Path;

use serde_json::json;

pub use bundles::find as bundles;
use pods::{Pod, pods};

use crate::{Answer, cli::PsArgs};

/// Lists them.
pub fn run(asked: &PsArgs) -> Result<Answer, String> {
    let pods = pods(bundles(&asked.state), Path::new("/proc"));
    Ok(Answer { text: if asked.json { as_json(&pods) } else { as_table(&pods) }, good: true })
}

fn as_json(pods: &[Pod]) -> String {
    let pods: Vec<_> = pods.iter().map(Pod::to_json).collect();
    format!("{:#}\n", json!({"pods": pods}))
}

fn as_table(pods: &[Pod]) -> String {
    let head = ["NAMESPACE", "POD", "STATE", "SHIM", "VMM", "AGE", "MEMORY", "CONTAINERS"].map(str::to_owned);
    let rows: Vec<_> = [head].into_iter().chain(pods.iter().map(row)).collect();
    let widths: Vec<_> =
        (0..8).map(|column| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0)).collect();
    let line = |row: &[String; 8]| {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}  "));
        format!("{}\n", cells.collect::<String>().trim_end())
    };
    rows.iter().map(line).collect()
}

fn row(pod: &Pod) -> [String; 8] {
    let number = |number: Option<u32>| number.map_or_else(|| "-".into(), |number| number.to_string());
    let containers: Vec<_> = pod.containers.iter().map(|container| container.id.as_str()).collect();
    [
        pod.namespace.clone(),
        pod.name.clone(),
        pod.state().to_owned(),
        number(pod.shim.as_ref().map(|process| process.pid)),
        number(pod.vmm.as_ref().map(|process| process.pid)),
        pod.age_s().map_or_else(|| "-".into(), age),
        pod.memory_kib().map_or_else(|| "-".into(), |kib| format!("{:.1} MiB", kib as f64 / 1024.0)),
        containers.join(","),
    ]
}

/// As a person says it: the largest unit, and the next one.
fn age(seconds: u64) -> String {
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds}s"),
        (0, 0, minutes) => format!("{minutes}m{:02}s", seconds % 60),
        (0, hours, minutes) => format!("{hours}h{:02}m", minutes % 60),
        (days, hours, _) => format!("{days}d{:02}h", hours % 24),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_are_said_in_two_units() {
        for (seconds, said) in [(0, "0s"), (59, "59s"), (61, "1m01s"), (3_660, "1h01m"), (90_000, "1d01h")] {
            assert_eq!(age(seconds), said);
        }
    }

    #[test]
    fn host_without_pods_has_a_table_without_rows() {
        assert_eq!(as_table(&[]), "NAMESPACE  POD  STATE  SHIM  VMM  AGE  MEMORY  CONTAINERS\n");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&as_json(&[])).expect("JSON"), json!({"pods": []}));
    }
}
