//! The figures that `make test` holds, each a multiple of a whole start under runc.
//!
//! * **The machine**: from the shim's order for a VMM to the process's exit as the shim sees it, each phase as long as in
//!   the middle of all runs.
//! * **The whole start**, as ctr sees it: the middle run.
//!
//! The unit is runc's middle run. Boots agree within one per cent, so either may worsen by two.
//!
//! Multiples and not numbers of instructions, because the lab's containerd and kernel come from Debian and move: they
//! move both starts. A reference changes only with a reason in the commit that changes it.

use std::fs;

use serde::Deserialize;

use crate::{
    measure::Measured,
    report::{ms, read},
};

/// How much dearer a figure may become, as a part of the reference.
const TOLERANCE: f64 = 0.02;

/// What lies in the repository: multiples of runc's middle run.
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
    let judged =
        verdict("the machine", machine, known.machine_by_runc).and(verdict("a cold start", whole, known.nacre_by_runc));
    judged.map_err(|error| format!("{error}; the reference is in {reference}"))
}

fn multiples(boot: &Measured) -> Result<(f64, f64), String> {
    let middle = |name| boot.middle(name).ok_or_else(|| format!("{name} was not measured"));
    let (nacre, runc) = (middle("nacre")?, middle("runc")?);
    let phases = boot.phases().ok_or("no phases were measured")?;
    println!("counted: nacre {:.1} ms, runc {:.1}", ms(nacre), ms(runc));
    phases.print();
    Ok((phases.machine() as f64 / runc as f64, nacre as f64 / runc as f64))
}

fn verdict(what: &str, figure: f64, reference: f64) -> Result<(), String> {
    println!("{what} is {figure:.3} x runc's start; the reference is {reference:.3}");
    if figure > reference * (1.0 + TOLERANCE) {
        let more = (figure / reference - 1.0) * 100.0;
        return Err(format!("{what} has become {more:.1} % dearer ({figure:.3} x runc's instead of {reference:.3})"));
    }
    if figure < reference * (1.0 - TOLERANCE) {
        println!("that is better by more than {:.0} %: put it into the reference", TOLERANCE * 100.0);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dearer_start_fails_and_a_cheaper_one_does_not() {
        assert!(verdict("it", 1.19 * 1.021, 1.19).is_err());
        for fine in [1.19 * 1.019, 1.19, 0.9] {
            verdict("it", fine, 1.19).expect("not dearer");
        }
    }
}
