//! Bad input: a clear error, nothing left behind.

use tests::{Census, Container, Settings, images, shell};

/// Runs a container that must fail with `text`, and looks for what it left.
#[track_caller]
fn refuse(container: &Container, text: &str) {
    let before = Census::take();
    let _ = container.run().expect_failure_with(text);
    before.expect_nothing_new();
}

fn anything() -> Container {
    Container::new(images::BUSYBOX).command(&["true"])
}

#[test]
fn missing_entry_point_is_named() {
    refuse(&Container::new(images::BUSYBOX).command(&["nope"]), r#"exec: "nope": executable file not found in $PATH"#);
    refuse(
        &Container::new(images::BUSYBOX).command(&["/bin/nope"]),
        r#"exec: "/bin/nope": stat /bin/nope: no such file or directory"#,
    );
}

#[test]
fn entry_point_that_is_a_folder_is_named() {
    refuse(&Container::new(images::BUSYBOX).command(&["/etc"]), r#"exec: "/etc": is a directory"#);
}

#[test]
fn entry_point_that_is_not_executable_is_named() {
    refuse(&Container::new(images::BUSYBOX).command(&["/etc/passwd"]), r#"exec: "/etc/passwd": permission denied"#);
}

#[test]
fn missing_kernel_is_named() {
    let _settings = Settings::with("[paths]\nkernel = \"/nonexistent/vmlinux\"\n");
    refuse(&anything(), "/nonexistent/vmlinux");
}

#[test]
fn missing_agent_is_named() {
    let _settings = Settings::with("[paths]\nagent = \"/nonexistent/agent.cpio\"\n");
    refuse(&anything(), "/nonexistent/agent.cpio");
}

#[test]
fn kernel_that_is_no_elf_is_named() {
    let _settings = Settings::with_image("kernel", &[0; 8192]);
    refuse(&anything(), "not an ELF file");
}

#[test]
fn agent_that_is_no_archive_is_named() {
    let _settings = Settings::with_image("agent", &[0; 8192]);
    refuse(&anything(), "not an uncompressed newc cpio archive");
}

#[test]
fn missing_vmm_is_named() {
    let _settings = Settings::with("[paths]\nvmm = \"/nonexistent/nacre-vmm\"\n");
    refuse(&anything(), "/nonexistent/nacre-vmm");
}

#[test]
fn unknown_key_in_the_settings_is_named() {
    let _settings = Settings::with("[machine]\nmemroy_mib = 256\n");
    refuse(&anything(), "memroy_mib");
}

#[test]
fn missing_kvm_is_named() {
    let _ = shell("mv /dev/kvm /dev/kvm.away").expect_code(0);
    let before = Census::take();
    let outcome = anything().run();
    let _ = shell("mv /dev/kvm.away /dev/kvm").expect_code(0);
    let _ = outcome.expect_failure_with("/dev/kvm");
    before.expect_nothing_new();
}

#[test]
fn guest_that_panics_at_boot_is_reported_with_its_console() {
    let _settings = Settings::with("[machine]\nkernel_cmdline = \"rdinit=/nonexistent init=/nonexistent\"\n");
    let before = Census::take();
    let outcome = anything().run().expect_failure_with("the guest kernel panicked");
    assert!(outcome.stderr.contains("Kernel panic"), "{}", outcome.stderr);
    before.expect_nothing_new();
}

#[test]
fn root_that_cannot_be_mounted_is_refused() {
    refuse(&Container::new("/nonexistent").flag("--rootfs").command(&["true"]), "/nonexistent");
}

#[test]
fn bind_mount_without_a_source_is_refused() {
    let container = anything();
    refuse(&container.flag("--mount=type=bind,src=/nonexistent,dst=/data,options=rbind"), "/nonexistent");
}

#[test]
fn terminal_is_refused_by_name_for_now() {
    let script =
        format!("script -qec 'ctr run --rm -t --runtime {} {} tty true' /dev/null", tests::RUNTIME, images::BUSYBOX);
    let before = Census::take();
    let outcome = shell(&script);
    assert!(outcome.stdout.contains("terminal"), "{outcome:?}");
    let _ = shell("ctr container rm tty");
    before.expect_nothing_new();
}
