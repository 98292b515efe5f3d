//! `nacre`: what the operator of a host asks.
//!
//! ```text
//!   nacre check         can this host run pods? one line per requirement, with the fix
//!   nacre ps            what runs here, and what it costs
//!   nacre config show   which settings are in force, and who said so
//! ```
//!
//! It asks neither containerd nor a shim: everything is read from files and from `/proc`, so that it answers when they do
//! not. It changes nothing. Exit codes: 0, 1 for "no" and for errors (which go to standard error), 2 for a command line
//! that makes no sense.
#![forbid(unsafe_code)]

mod check;
mod cli;
mod program;
mod ps;
mod settings;

use std::{
    io::{self, Write},
    process::ExitCode,
};

use clap::Parser;
use cli::{Cli, Command, ConfigCommand};

/// What a command has to say.
struct Answer {
    text: String,
    good: bool,
}

fn main() -> ExitCode {
    let answer = match Cli::parse().command {
        Command::Check(asked) => check::run(&asked),
        Command::Ps(asked) => ps::run(&asked),
        Command::Config(ConfigCommand::Show(asked)) => settings::show(&asked),
    };
    let answer = match answer {
        Ok(answer) => answer,
        Err(error) => {
            eprintln!("nacre: {error}");
            return ExitCode::FAILURE;
        }
    };
    match io::stdout().write_all(answer.text.as_bytes()) {
        // A pager that was left early has seen what it wanted.
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            eprintln!("nacre: cannot write the answer: {error}");
            ExitCode::FAILURE
        }
        _ if answer.good => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    }
}
