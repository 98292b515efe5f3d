//! Bundles that share a shim are a pod.

use std::{collections::BTreeMap, path::Path};

use serde_json::{Value, json};

use super::{bundles::Bundle, process::Process};

/// A container of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Container {
    /// Its id.
    pub id: String,
    /// The process that stands for it on the host, while it lives.
    pub holder: Option<Process>,
}

/// A pod: one shim, one VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pod {
    /// Its namespace in containerd.
    pub namespace: String,
    /// The id of its first container.
    pub name: String,
    /// Its containers, the first one first.
    pub containers: Vec<Container>,
    /// Its shim, if that lives.
    pub shim: Option<Process>,
    /// Its VMM, if that lives.
    pub vmm: Option<Process>,
}

/// Puts bundles together. `proc` is where processes are looked for.
pub fn pods(bundles: Vec<Bundle>, proc: &Path) -> Vec<Pod> {
    let mut groups: BTreeMap<(String, String), Vec<Bundle>> = BTreeMap::new();
    for bundle in bundles {
        groups.entry((bundle.namespace.clone(), bundle.address.clone())).or_default().push(bundle);
    }
    let mut pods: Vec<_> = groups.into_values().map(|group| pod(group, proc)).collect();
    pods.sort_by(|a, b| (&a.namespace, &a.name).cmp(&(&b.namespace, &b.name)));
    pods
}

fn pod(mut group: Vec<Bundle>, proc: &Path) -> Pod {
    // The VMM is recorded where the shim was started: in the bundle of the first container.
    group.sort_by_key(|bundle| (bundle.recorded("vmm.pid").is_none(), bundle.id.clone()));
    let container = |bundle: &Bundle| Container {
        id: bundle.id.clone(),
        holder: bundle.recorded("holder.pid").and_then(|recorded| recorded.find(proc)),
    };
    Pod {
        containers: group.iter().map(container).collect(),
        shim: group.iter().find_map(|bundle| bundle.shim.find(proc)),
        vmm: group.iter().find_map(|bundle| bundle.recorded("vmm.pid")?.find(proc)),
        // A group has at least the bundle that it was made for.
        namespace: group.first().map(|bundle| bundle.namespace.clone()).unwrap_or_default(),
        name: group.first().map(|bundle| bundle.id.clone()).unwrap_or_default(),
    }
}

impl Pod {
    /// How it is, in one word.
    pub fn state(&self) -> &'static str {
        match (&self.shim, &self.vmm) {
            (None, _) => "dead",
            (Some(_), None) => "no-vm",
            (Some(_), Some(_)) => "running",
        }
    }

    /// Seconds since its shim started.
    pub fn age_s(&self) -> Option<u64> {
        self.shim.as_ref().map(|process| process.age_s)
    }

    /// What shim and VMM take, guest included.
    pub fn memory_kib(&self) -> Option<u64> {
        let living: Vec<_> = [&self.shim, &self.vmm].into_iter().flatten().collect();
        if living.is_empty() {
            return None;
        }
        living.iter().map(|process| process.pss_kib).sum()
    }

    /// For a program.
    pub fn to_json(&self) -> Value {
        let process = |process: &Option<Process>| {
            process.as_ref().map(|process| json!({"pid": process.pid, "pss_kib": process.pss_kib}))
        };
        let containers: Vec<_> = self
            .containers
            .iter()
            .map(|container| json!({"id": container.id, "pid": container.holder.as_ref().map(|holder| holder.pid)}))
            .collect();
        json!({
            "namespace": self.namespace, "pod": self.name, "state": self.state(), "age_s": self.age_s(),
            "memory_kib": self.memory_kib(), "shim": process(&self.shim), "vmm": process(&self.vmm),
            "containers": containers,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, path::PathBuf};

    use super::*;
    use crate::ps::bundles;

    struct Host(tempfile::TempDir);

    impl Host {
        fn new() -> Self {
            let host = Self(tempfile::tempdir().expect("temporary directory"));
            fs::create_dir(host.proc()).expect("create");
            fs::write(host.proc().join("uptime"), "100.0 1.0").expect("write");
            host
        }

        fn proc(&self) -> PathBuf {
            self.0.path().join("proc")
        }

        fn process(&self, pid: u32, kib: u64) {
            let folder = self.proc().join(pid.to_string());
            fs::create_dir(&folder).expect("create");
            fs::write(folder.join("stat"), format!("{pid} (x) S 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 5 9"))
                .expect("write");
            fs::write(folder.join("smaps_rollup"), format!("Pss: {kib} kB\n")).expect("write");
        }

        fn bundle(&self, id: &str, address: &str, records: &[(&str, u32)]) {
            let bundle = self.0.path().join("state/default").join(id);
            fs::create_dir_all(&bundle).expect("create");
            fs::write(bundle.join("address"), address).expect("write");
            for (name, pid) in records {
                fs::write(bundle.join(name), format!("{pid} 5")).expect("write");
            }
        }

        fn pods(&self) -> Vec<Pod> {
            let state = self.0.path().join("state");
            let found = bundles(std::slice::from_ref(&state));
            pods(found.into_iter().filter(|bundle| bundle.directory.starts_with(&state)).collect(), &self.proc())
        }
    }

    #[test]
    fn containers_of_one_shim_are_one_pod_named_after_the_first() {
        let host = Host::new();
        host.process(10, 3000);
        host.process(11, 40_000);
        host.process(12, 100);
        host.bundle("sandbox", "unix:///a", &[("shim.pid", 10), ("vmm.pid", 11), ("holder.pid", 12)]);
        host.bundle("app", "unix:///a", &[("shim.pid", 10), ("holder.pid", 99)]);
        let pods = host.pods();
        assert_eq!(pods.len(), 1);
        let pod = &pods[0];
        assert_eq!((pod.name.as_str(), pod.state(), pod.memory_kib()), ("sandbox", "running", Some(43_000)));
        let json = pod.to_json();
        assert_eq!(json["containers"], json!([{"id": "sandbox", "pid": 12}, {"id": "app", "pid": null}]));
        assert_eq!(json["vmm"], json!({"pid": 11, "pss_kib": 40_000}));
    }

    #[test]
    fn what_has_died_is_said() {
        let host = Host::new();
        host.process(10, 3000);
        host.bundle("a", "unix:///a", &[("shim.pid", 10), ("vmm.pid", 98)]);
        host.bundle("b", "unix:///b", &[("shim.pid", 97), ("vmm.pid", 98)]);
        let states: Vec<_> = host.pods().iter().map(|pod| (pod.state(), pod.memory_kib())).collect();
        assert_eq!(states, [("no-vm", Some(3000)), ("dead", None)]);
    }
}
