//! The figures that `make test` holds, each a multiple of a whole start under runc.
//!
//! * **The machine**: from the shim's order for a VMM to the process's exit as the shim sees it. All of that is ours, and
//!   boots agree within one and a half per cent, so it may worsen by two.
//! * **The whole start**, as ctr sees it. A third of it is ctr's and containerd's, so it may worsen by five.
//!
//! Each is the sum of its phases, every phase as short as any run of the boot had it: Go's scheduler lengthens one phase or
//! another of nearly every run, by up to twenty virtual ms, and seldom the same one in all. The unit is runc's shortest run,
//! which a boot misses now and then (266 instead of 245): such a boot holds less, and fails nothing that it should not.
//!
//! Multiples and not numbers of instructions, because the lab's containerd and kernel come from Debian and move: they
//! move both starts. A reference changes only with a reason in the commit that changes it.

use std::fs;

use serde::Deserialize;

use crate::{
    measure::Measured,
    report::{ms, read},
};

/// What lies in the repository: multiples of runc's shortest run.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Reference {
    machine_by_runc: f64,
    nacre_by_runc: f64,
}

/// Compares one boot with the reference.
pub fn against(reference: &str, run: &str) -> Result<(), String> {
    let text = fs::read_to_string(reference).map_err(|error| format!("cannot read {reference}: {error}"))?;
    let known: Reference = serde_json::from_str(&text).map_err(|error| format!("{reference}: {error}"))?;
    let (machine, whole) = multiples(&read(run)?)?;
    let judged = verdict("the machine", machine, known.machine_by_runc, 0.02).and(verdict(
        "a cold start",
        whole,
        known.nacre_by_runc,
        0.05,
    ));
    judged.map_err(|error| format!("{error}; the reference is in {reference}"))
}

fn multiples(boot: &Measured) -> Result<(f64, f64), String> {
    let least = |name| boot.least(name).ok_or_else(|| format!("{name} was not measured"));
    let (nacre, runc) = (least("nacre")?, least("runc")?);
    let floor = boot.floor().ok_or("no phases were measured")?;
    println!(
        "counted: nacre {:.1} ms, phases at their shortest {:.1}, runc {:.1}",
        ms(nacre),
        ms(floor.whole()),
        ms(runc)
    );
    for (what, length) in &floor.0 {
        println!("{:>9.2}  {what}", ms(*length));
    }
    Ok((floor.machine() as f64 / runc as f64, floor.whole() as f64 / runc as f64))
}

fn verdict(what: &str, figure: f64, reference: f64, tolerance: f64) -> Result<(), String> {
    println!("{what} is {figure:.3} x runc's start; the reference is {reference:.3}");
    if figure > reference * (1.0 + tolerance) {
        let more = (figure / reference - 1.0) * 100.0;
        return Err(format!("{what} has become {more:.1} % dearer ({figure:.3} x runc's instead of {reference:.3})"));
    }
    if figure < reference * (1.0 - tolerance) {
        println!("that is better by more than {:.0} %: put it into the reference", tolerance * 100.0);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dearer_start_fails_and_a_cheaper_one_does_not() {
        assert!(verdict("it", 1.19 * 1.021, 1.19, 0.02).is_err());
        for fine in [1.19 * 1.019, 1.19, 0.9] {
            verdict("it", fine, 1.19, 0.02).expect("not dearer");
        }
    }
}
