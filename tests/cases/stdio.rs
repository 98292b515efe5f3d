//! Bytes in, bytes out, end of file, order.

use tests::{Container, images};

#[test]
fn stdin_reaches_the_container_and_ends_there() {
    let text: String = (0..20_000).map(|line| format!("line {line}\n")).collect();
    let outcome = Container::new(images::BUSYBOX).command(&["md5sum"]).stdin(text.as_bytes()).run().expect_code(0);
    let expected = tests::shell("seq -f 'line %.0f' 0 19999 | md5sum").expect_code(0);
    assert_eq!(outcome.stdout, expected.stdout);
}

#[test]
fn every_byte_arrives_before_the_exit() {
    // Nothing in the guest waits for the output to be taken: the last bytes race with the exit.
    let outcome =
        Container::new(images::BUSYBOX).script("head -c 4000000 /dev/zero | tr '\\0' x; echo end").run().expect_code(0);
    assert_eq!(outcome.stdout.len(), 4_000_004);
    assert!(outcome.stdout.ends_with("xend\n"));
}

#[test]
fn stdout_and_stderr_stay_apart() {
    let outcome = Container::new(images::BUSYBOX).script("echo out; echo err >&2").run().expect_code(0);
    assert_eq!((outcome.stdout.as_str(), outcome.stderr.as_str()), ("out\n", "err\n"));
}

#[test]
fn stdout_can_be_opened_again_by_name() {
    let outcome = Container::new(images::BUSYBOX).script("echo again > /dev/stdout; echo and > /proc/self/fd/1").run();
    assert_eq!(outcome.expect_code(0).stdout, "again\nand\n");
}

#[test]
fn container_that_ignores_its_stdin_still_ends() {
    let _ = Container::new(images::BUSYBOX).command(&["true"]).stdin(&vec![b'x'; 1 << 20]).run().expect_code(0);
}
