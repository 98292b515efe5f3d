//! Many at once.

use tests::{Census, Container, Settings, images};

/// Six machines on the one CPU of an emulated lab each get a sixth of it; `CASES_AT_ONCE` asks for more where there is more.
fn at_once() -> usize {
    std::env::var("CASES_AT_ONCE").ok().and_then(|number| number.parse().ok()).unwrap_or(6)
}

#[test]
fn starts_at_once_all_succeed_and_leave_nothing_behind() {
    let before = Census::take();
    let _settings = Settings::with("[shim]\nboot_timeout_s = 300\n");
    let containers: Vec<_> =
        (0..at_once()).map(|nth| (nth, Container::new(images::BUSYBOX).script(&format!("echo {nth}")))).collect();
    let started: Vec<_> = containers.iter().map(|(nth, container)| (nth, container.start())).collect();
    for (nth, child) in started {
        let output = child.wait_with_output().expect("ctr ends");
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(
            (output.status.code(), String::from_utf8_lossy(&output.stdout)),
            (Some(0), format!("{nth}\n").into()),
            "{stderr}"
        );
    }
    before.expect_nothing_new();
}
