//! The figure that `make test` holds: a cold start under nacre, as a multiple of the same start under runc.
//!
//! A multiple and not a number of instructions, because the lab's containerd and kernel come from Debian and move: they
//! move both starts. The reference changes only with a reason in the commit that changes it.

use std::fs;

use serde::Deserialize;

use crate::{
    measure::Measured,
    report::{ms, read},
};

/// How much dearer a start may be than the reference says, as a part of it. Boots agree within a quarter of this.
const TOLERANCE: f64 = 0.02;

/// What lies in the repository.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Reference {
    /// Medians: nacre's by runc's.
    nacre_by_runc: f64,
}

/// Compares one boot with the reference.
pub fn against(reference: &str, run: &str) -> Result<(), String> {
    let text = fs::read_to_string(reference).map_err(|error| format!("cannot read {reference}: {error}"))?;
    let reference_file: Reference = serde_json::from_str(&text).map_err(|error| format!("{reference}: {error}"))?;
    let figure = multiple(&read(run)?)?;
    verdict(figure, reference_file.nacre_by_runc).map_err(|error| format!("{error}; the reference is in {reference}"))
}

fn multiple(boot: &Measured) -> Result<f64, String> {
    let median = |name| boot.median(name).ok_or_else(|| format!("{name} was not measured"));
    let (nacre, runc) = (median("nacre")?, median("runc")?);
    println!("counted: nacre {:.1} ms, runc {:.1} ms", ms(nacre), ms(runc));
    for (what, length) in &boot.phases.0 {
        println!("{:>9.2}  {what}", ms(*length));
    }
    Ok(nacre as f64 / runc as f64)
}

fn verdict(figure: f64, reference: f64) -> Result<(), String> {
    println!("a cold start is {figure:.3} x runc's; the reference is {reference:.3}");
    if figure > reference * (1.0 + TOLERANCE) {
        let more = (figure / reference - 1.0) * 100.0;
        return Err(format!("a start has become {more:.1} % dearer ({figure:.3} x runc's instead of {reference:.3})"));
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
        assert!(verdict(1.19 * 1.021, 1.19).is_err());
        for fine in [1.19 * 1.019, 1.19, 0.9] {
            verdict(fine, 1.19).expect("not dearer");
        }
    }
}
