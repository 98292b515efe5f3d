//! `nacre check`: what a host needs to run pods, one requirement a line.
//!
//! A check looks, and never changes anything. It says what it found; if that is not good enough, also what to do. Nothing
//! is assumed to work: programs are run with a deadline, files are read up to a limit, and a check that cannot be made
//! fails, because "unknown" is no help to anybody at three in the morning.

mod containerd;
mod host;
mod images;
mod kvm;
mod programs;

use std::path::Path;

use clap::ValueEnum;
use config::Asked;
use serde_json::json;

use crate::{Answer, cli::CheckArgs};

/// What can be asked for by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Area {
    /// The configuration file is legal.
    Settings,
    /// VMM and holder are installed.
    Programs,
    /// KVM runs a guest kernel.
    Kvm,
    /// The host's kernel has what is needed.
    Kernel,
    /// cgroup v2 with its controllers.
    Cgroup,
    /// containerd runs, is new enough and finds the shim.
    Containerd,
    /// Guest kernel and agent are intact.
    Images,
}

/// One requirement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Check {
    name: &'static str,
    /// What was found, or what is wrong.
    detail: String,
    /// What to do; `None` if it is fine.
    fix: Option<String>,
}

impl Check {
    fn pass(name: &'static str, detail: impl Into<String>) -> Self {
        Self { name, detail: detail.into(), fix: None }
    }

    fn fail(name: &'static str, detail: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { name, detail: detail.into(), fix: Some(fix.into()) }
    }

    fn is_good(&self) -> bool {
        self.fix.is_none()
    }
}

/// Checks what is asked for.
pub fn run(asked: &CheckArgs) -> Result<Answer, String> {
    let checks = make(|area| asked.areas.is_empty() || asked.areas.contains(&area));
    let good = checks.iter().all(Check::is_good);
    Ok(Answer { text: if asked.json { as_json(&checks) } else { as_lines(&checks) }, good })
}

fn make(wanted: impl Fn(Area) -> bool) -> Vec<Check> {
    let root = Path::new("/");
    let settings = config::load(&Asked::default());
    let (spec, settings) = match settings {
        Ok(effective) => {
            let detail = effective.summary();
            (effective.spec, Check::pass("settings", detail))
        }
        Err(error) => {
            let fix = "correct that line; `nacre config show` shows what is in force";
            (config::Spec::default(), Check::fail("settings", error.to_string(), fix))
        }
    };
    let mut checks = Vec::new();
    let mut when = |area: Area, found: &dyn Fn() -> Vec<Check>| {
        if wanted(area) {
            checks.extend(found());
        }
    };
    when(Area::Settings, &|| vec![settings.clone()]);
    when(Area::Programs, &|| programs::checks(&spec.paths));
    when(Area::Kvm, &|| vec![kvm::check(&spec.paths.vmm, &spec.paths.kvm)]);
    when(Area::Kernel, &|| host::kernel(root));
    when(Area::Cgroup, &|| vec![host::cgroup(root)]);
    when(Area::Containerd, &|| containerd::checks(root));
    when(Area::Images, &|| images::checks(&spec.paths));
    checks
}

fn as_lines(checks: &[Check]) -> String {
    let width = checks.iter().map(|check| check.name.len()).max().unwrap_or_default();
    let line = |check: &Check| match &check.fix {
        None => format!("pass  {:width$}  {}\n", check.name, check.detail),
        Some(fix) => format!("FAIL  {:width$}  {}. Fix: {fix}\n", check.name, check.detail),
    };
    checks.iter().map(line).collect()
}

fn as_json(checks: &[Check]) -> String {
    let one =
        |check: &Check| json!({"name": check.name, "ok": check.is_good(), "detail": check.detail, "fix": check.fix});
    let list: Vec<_> = checks.iter().map(one).collect();
    format!("{:#}\n", json!({"ok": checks.iter().all(Check::is_good), "checks": list}))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_requirement_is_one_line_and_a_failure_says_what_to_do() {
        let checks = [Check::pass("kvm", "fine"), Check::fail("cgroup", "version 1", "boot with version 2")];
        let text = as_lines(&checks);
        assert_eq!(text, "pass  kvm     fine\nFAIL  cgroup  version 1. Fix: boot with version 2\n");
        let json: serde_json::Value = serde_json::from_str(&as_json(&checks)).expect("JSON");
        assert_eq!((&json["ok"], &json["checks"][0]["ok"]), (&false.into(), &true.into()));
        assert_eq!(
            (&json["checks"][0]["fix"], &json["checks"][1]["fix"]),
            (&json!(null), &"boot with version 2".into())
        );
    }

    #[test]
    fn only_what_is_asked_for_is_checked() {
        let checks = make(|area| area == Area::Kernel);
        assert!(!checks.is_empty() && checks.iter().all(|check| check.name != "kvm" && check.name != "settings"));
    }
}
