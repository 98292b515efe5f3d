//! Our terminal while `lab shell` runs: raw, so that every key goes to the guest, and put back whatever happens.
//!
//! It is done by `stty`, which is everywhere that a terminal is. Without a terminal on stdin nothing is done and bytes go
//! through as they come.

use std::io::{self, IsTerminal};
use std::process::{Command, Stdio};

/// Raw mode until dropped.
pub struct Raw {
    saved: Option<String>,
}

impl Raw {
    /// Switches stdin's terminal to raw mode.
    pub fn enter() -> Self {
        let saved = io::stdin().is_terminal().then(|| stty(&["-g"])).flatten();
        if saved.is_some() {
            stty(&["raw", "-echo"]);
        }
        Self { saved }
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        if let Some(saved) = &self.saved {
            stty(&[saved.trim()]);
        }
    }
}

/// Rows and columns, or what a terminal has by default.
pub fn size() -> (u16, u16) {
    let text = stty(&["size"]).unwrap_or_default();
    let mut numbers = text.split_whitespace().filter_map(|n| n.parse().ok());
    match (numbers.next(), numbers.next()) {
        (Some(rows), Some(cols)) if rows > 0 && cols > 0 => (rows, cols),
        _ => (24, 80),
    }
}

/// `stty` on our stdin.
fn stty(words: &[&str]) -> Option<String> {
    let output = Command::new("stty").args(words).stdin(Stdio::inherit()).stderr(Stdio::null()).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}
