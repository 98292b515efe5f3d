//! The half on the host: several boots side by side, the table, the files, and the check that they agree.

use std::{fs, path::Path};

use serde_json::json;

use crate::{contender, measure::Measured, phases::Phases, plot};

/// How far the figures of two boots may lie apart, as a part of the smaller.
const AGREEMENT: f64 = 0.005;

/// Reads the runs, prints the table, writes `results.json` and `start.svg` into `folder`.
pub fn write(folder: &str, runs: &[&str]) -> Result<(), String> {
    let boots = runs.iter().map(|run| read(run)).collect::<Result<Vec<_>, _>>()?;
    let folder = Path::new(folder);
    fs::create_dir_all(folder).map_err(|error| format!("cannot make {}: {error}", folder.display()))?;
    let mut disagreements = Vec::new();
    println!(
        "ctr run --rm busybox true, counted (1 virtual ms = 1,000,000 instructions); the middle run\n\
         of each boot\n"
    );
    println!("{:<10} {:>44} {:>9} {:>9}", "", "boots (ms)", "spread", "of runc");
    let runc = boots.first().and_then(|boot| boot.middle("runc"));
    for contender in &contender::ALL {
        let figures: Vec<u64> = boots.iter().filter_map(|boot| boot.middle(contender.name)).collect();
        let (least, most) = (figures.iter().min(), figures.iter().max());
        let (Some(least), Some(most)) = (least, most) else { return Err(format!("{} has no runs", contender.name)) };
        let spread = (most - least) as f64 / *least as f64;
        let listed: Vec<String> = figures.iter().map(|ns| format!("{:.1}", ms(*ns))).collect();
        let ratio = runc.map_or(f64::NAN, |runc| figures[0] as f64 / runc as f64);
        println!("{:<10} {:>44} {:>8.2}% {ratio:>9.2}", contender.name, listed.join("  "), spread * 100.0);
        if spread > AGREEMENT {
            disagreements.push(format!("{} by {:.2} %", contender.name, spread * 100.0));
        }
    }
    print_phases(&boots[0].phases().ok_or("no phases were measured")?);
    save(folder, &boots)?;
    if disagreements.is_empty() {
        println!("\nAll boots agree within {} %. Written: {}", AGREEMENT * 100.0, folder.display());
        return Ok(());
    }
    Err(format!("boots disagree by more than {} %: {}", AGREEMENT * 100.0, disagreements.join(", ")))
}

fn print_phases(phases: &Phases) {
    println!("\nnacre, phase by phase (ms)");
    phases.print();
}

fn save(folder: &Path, boots: &[Measured]) -> Result<(), String> {
    let results = folder.join("results.json");
    let text = serde_json::to_string_pretty(&json!({ "unit": "virtual ns", "boots": boots }));
    let text = text.map_err(|error| error.to_string())?;
    fs::write(&results, text).map_err(|error| format!("cannot write {}: {error}", results.display()))?;
    plot::draw(&folder.join("start.svg"), &boots[0])
}

pub fn read(run: &str) -> Result<Measured, String> {
    let text = fs::read_to_string(run).map_err(|error| format!("cannot read {run}: {error}"))?;
    serde_json::from_str(&text).map_err(|error| format!("{run}: {error}"))
}

pub fn ms(ns: u64) -> f64 {
    ns as f64 / 1e6
}
