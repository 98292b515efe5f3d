//! The main job, as a user does it.

use tests::{Census, Container, images, shell};

#[test]
fn container_runs_on_a_kernel_of_its_own() {
    let before = Census::take();
    let guest = Container::new(images::BUSYBOX).command(&["uname", "-r"]).run().expect_code(0);
    let host = shell("uname -r").expect_code(0);
    assert!(guest.stdout.trim().ends_with("-nacre"), "{}", guest.stdout);
    assert_ne!(guest.stdout, host.stdout);
    before.expect_nothing_new();
}

#[test]
fn exit_code_of_the_container_is_ctrs() {
    for code in [0, 7, 255] {
        let _ = Container::new(images::BUSYBOX).script(&format!("exit {code}")).run().expect_code(code);
    }
}

#[test]
fn signal_that_kills_init_is_128_and_its_number() {
    // A pid namespace's init is immune to signals of its own kind, so the child is killed and the shell says so.
    let outcome = Container::new(images::BUSYBOX).script("sh -c 'kill -9 $$'; exit $?").run();
    let _ = outcome.expect_code(137);
}

#[test]
fn python_computes_with_its_compiled_modules() {
    let program = "import json, ssl, sqlite3; c = sqlite3.connect(':memory:'); \
                   n = c.execute('select 6*7').fetchone()[0]; print(json.dumps({'n': n}), ssl.OPENSSL_VERSION[:7])";
    let outcome = Container::new(images::PYTHON).command(&["python3", "-c", program]).run().expect_code(0);
    assert_eq!(outcome.stdout.trim(), r#"{"n": 42} OpenSSL"#);
}

#[test]
fn debian_container_sees_its_own_system() {
    let script = "cat /etc/os-release; id -u; hostname; echo $HOME; pwd; ls -ld /proc/1 >/dev/null; cat /proc/1/comm";
    let outcome = Container::new(images::DEBIAN).flag("--cwd=/usr").script(script).run().expect_code(0);
    assert!(outcome.stdout.contains("Debian"), "{}", outcome.stdout);
    let lines: Vec<&str> = outcome.stdout.lines().collect();
    let [.., uid, _hostname, home, cwd, first] = lines[..] else { panic!("{}", outcome.stdout) };
    assert_eq!((uid, home, cwd, first), ("0", "/root", "/usr", "sh"));
}

#[test]
fn environment_and_user_are_the_specs() {
    let outcome = Container::new(images::BUSYBOX)
        .flag("--env=GREETING=hello world")
        .flag("--user=1234:5678")
        .script("echo $GREETING; id -u; id -g; touch /root/x 2>/dev/null || echo denied")
        .run()
        .expect_code(0);
    assert_eq!(outcome.stdout, "hello world\n1234\n5678\ndenied\n");
}
