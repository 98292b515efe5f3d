//! Runs another program to its end, or to a deadline: what is checked may be what hangs.

use std::{
    io::{self, Read},
    path::Path,
    process::{Command, Stdio},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

/// Most that is read of what a program says.
const OUTPUT_MAX: u64 = 64 * 1024;

/// How often a program is looked after.
const TICK: Duration = Duration::from_millis(2);

/// Runs `program` on `input` and returns what it printed; an error says what went wrong with it.
pub fn output(program: &Path, arguments: &[&str], input: Stdio, within: Duration) -> Result<String, String> {
    let spawned =
        Command::new(program).args(arguments).stdin(input).stdout(Stdio::piped()).stderr(Stdio::null()).spawn();
    let mut child = spawned.map_err(|error| format!("cannot run {}: {error}", program.display()))?;
    let (sender, printed) = mpsc::channel();
    if let Some(stdout) = child.stdout.take() {
        // A thread of its own: a program that hangs may hold the pipe.
        thread::spawn(move || {
            let mut text = Vec::new();
            let outcome: io::Result<usize> = stdout.take(OUTPUT_MAX).read_to_end(&mut text);
            let _ = sender.send(outcome.map(|_| text));
        });
    }
    let deadline = Instant::now() + within;
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) if Instant::now() < deadline => thread::sleep(TICK),
            Ok(None) => {
                let _ = child.kill();
                // Not waited for: a process that hangs in the kernel does not die of a signal. We are not long for this
                // world ourselves, and init reaps it.
                return Err(format!("{} did not answer within {} s", program.display(), within.as_secs()));
            }
            Err(error) => return Err(format!("cannot wait for {}: {error}", program.display())),
        }
    };
    if !status.success() {
        return Err(format!("{} failed: {status}", program.display()));
    }
    match printed.recv_timeout(within) {
        Ok(Ok(text)) => Ok(String::from_utf8_lossy(&text).into_owned()),
        _ => Err(format!("cannot read what {} prints", program.display())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_is_returned_and_failures_are_named() {
        let sh = Path::new("/bin/sh");
        let (input, mut writer) = io::pipe().expect("pipe");
        io::Write::write_all(&mut writer, b"hi\n").expect("write");
        assert_eq!(output(sh, &["-c", "read x; echo $x"], input.into(), Duration::from_secs(5)).expect("runs"), "hi\n");
        let text = output(sh, &["-c", "exit 3"], Stdio::null(), Duration::from_secs(5)).expect_err("fails");
        assert!(text.contains("/bin/sh") && text.contains('3'), "{text}");
        let text =
            output(Path::new("/nonexistent/x"), &[], Stdio::null(), Duration::from_secs(5)).expect_err("is not there");
        assert!(text.contains("/nonexistent/x"), "{text}");
    }

    #[test]
    fn program_that_hangs_costs_no_more_than_the_deadline() {
        let before = Instant::now();
        let text =
            output(Path::new("/bin/sleep"), &["60"], Stdio::null(), Duration::from_millis(50)).expect_err("hangs");
        assert!(before.elapsed() < Duration::from_secs(5) && text.contains("did not answer"), "{text}");
    }
}
