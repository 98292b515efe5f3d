//! `perf`: what a start costs, counted and not timed.
//!
//! `make bench` boots the lab in counted mode three times (a virtual nanosecond is one instruction), runs
//! `perf measure` in each, and `perf report` on the host: a table on the terminal, `results.json` and `start.svg` in
//! a folder, and the check that the three runs agree. `make test` boots once, with nacre and runc alone, and
//! `perf hold` compares with the reference that lies beside this file.
#![forbid(unsafe_code)]

mod contender;
mod hold;
mod measure;
mod phases;
mod plot;
mod report;

use std::process::ExitCode;

const HELP: &str = "\
perf: what a container start costs, counted in the lab

  perf measure OUT.json N [NAME...]  in the lab, counted: run every contender (or those named) N times or more, write the figures
  perf hold REFERENCE.json RUN.json  on the host: fail if a start has become dearer than the reference by more than 2 %
  perf report FOLDER RUN.json...     on the host: table, FOLDER/results.json, FOLDER/start.svg

Example: make bench
";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let done = match words[..] {
        ["measure", out, wanted, ref names @ ..] => wanted
            .parse()
            .map_err(|error| format!("{wanted:?} is no number of runs: {error}"))
            .and_then(|wanted| measure::to_file(out, wanted, names)),
        ["hold", reference, run] => hold::against(reference, run),
        ["report", folder, ref runs @ ..] if !runs.is_empty() => report::write(folder, runs),
        _ => {
            eprint!("{HELP}");
            return ExitCode::from(2);
        }
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("perf: {error}");
            ExitCode::FAILURE
        }
    }
}
