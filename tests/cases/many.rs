//! Many, one after the other and at once. `tests/lab/soak` asks for more than `make test` has time for.

use std::process::Child;

use tests::{Census, Container, Settings, images};

/// How many, as the environment says, or as many as fit into a test.
fn number(name: &str, default: usize) -> usize {
    std::env::var(name).map_or(default, |number| number.parse().expect("a number"))
}

fn saying(text: &str) -> Container {
    Container::new(images::BUSYBOX).script(&format!("echo {text}"))
}

#[test]
fn runs_in_a_row_leave_nothing_behind() {
    let before = Census::take();
    for round in 0..number("CASES_IN_A_ROW", 50) {
        let outcome = saying(&round.to_string()).run().expect_code(0);
        assert_eq!(outcome.stdout, format!("{round}\n"));
    }
    before.expect_nothing_new();
}

/// Six machines on the one processor of an emulated lab each get a sixth of it.
#[test]
fn starts_at_once_all_succeed_and_leave_nothing_behind() {
    let before = Census::take();
    let _settings = Settings::with("[shim]\nboot_timeout_s = 600\n");
    for _ in 0..number("CASES_ROUNDS", 1) {
        let containers: Vec<_> = (0..number("CASES_AT_ONCE", 6)).map(|nth| saying(&nth.to_string())).collect();
        let started: Vec<_> = containers.iter().map(Container::start).collect();
        for (nth, child) in started.into_iter().enumerate() {
            expect_said(child, nth);
        }
        before.expect_nothing_new();
    }
}

#[track_caller]
fn expect_said(child: Child, nth: usize) {
    let output = child.wait_with_output().expect("ctr ends");
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!((output.status.code(), stdout), (Some(0), format!("{nth}\n")), "{stderr}");
}
