//! Where the root comes from, and where writes go.

use tests::{Census, Container, ctr, images, shell};

/// Unpacks the image for a snapshotter that the lab's containerd has beside the default one.
fn unpack(snapshotter: &str) {
    let words = ["image", "mount", "--snapshotter", snapshotter, images::BUSYBOX, "/mnt"];
    let _ = ctr(&words).expect_code(0);
    let _ = ctr(&["image", "unmount", "--snapshotter", snapshotter, "--rm", "/mnt"]).expect_code(0);
}

#[test]
fn file_written_by_the_container_is_in_the_hosts_snapshot() {
    let before = Census::take();
    let container =
        Container::new(images::BUSYBOX).keep().script("echo from the guest > /root/note; chmod 640 /root/note");
    let _ = container.run().expect_code(0);
    let id = container.id();
    let script =
        format!("ctr snapshot mounts /mnt {id} | sh && cat /mnt/root/note && stat -c %a /mnt/root/note; umount /mnt");
    assert_eq!(shell(&script).expect_code(0).stdout, "from the guest\n640\n");
    let _ = ctr(&["task", "rm", "-f", id]);
    let _ = ctr(&["container", "rm", id]).expect_code(0);
    before.expect_nothing_new();
}

#[test]
fn native_snapshots_serve_as_a_root() {
    unpack("native");
    let container = Container::new(images::BUSYBOX).flag("--snapshotter=native");
    let outcome = container.script("echo x > /x && cat /x && ls /bin/busybox").run().expect_code(0);
    assert_eq!(outcome.stdout, "x\n/bin/busybox\n");
}

/// Gives the lab's containerd a snapshotter whose snapshots are ext4 images, mounted through loop devices.
fn add_block_snapshotter() {
    let script = r#"set -e
        truncate -s 64M /var/lib/scratch.img
        mke2fs -q -F -t ext4 /var/lib/scratch.img
        cat >> /etc/containerd/config.toml <<TOML
[plugins."io.containerd.snapshotter.v1.blockfile"]
  root_path = "/var/lib/containerd-blockfile"
  scratch_file = "/var/lib/scratch.img"
  fs_type = "ext4"
  mount_options = []
TOML
        kill "$(cat /run/lab/containerd.notify.pid)"
        timeout 30 sh -c 'while pgrep -x containerd > /dev/null; do sleep 0.2; done'
        /usr/lib/lab/await-ready /run/lab/containerd.notify /var/log/containerd.log containerd"#;
    let _ = shell(script).expect_code(0);
}

#[test]
fn block_device_serves_as_a_root() {
    add_block_snapshotter();
    unpack("blockfile");
    let before = Census::take();
    let container = Container::new(images::BUSYBOX).flag("--snapshotter=blockfile");
    let outcome = container.script("echo x > /x && cat /x && ls /bin/busybox").run().expect_code(0);
    assert_eq!(outcome.stdout, "x\n/bin/busybox\n");
    before.expect_nothing_new();
    assert_eq!(shell("losetup -l -n | grep -c blockfile").stdout.trim(), "0", "loop devices are given back");
}

#[test]
fn root_given_as_a_plain_folder_works() {
    let make = "mkdir -p /tmp/plain/bin && cp /bin/busybox /tmp/plain/bin/ && ln -s busybox /tmp/plain/bin/sh";
    let _ = shell(make).expect_code(0);
    // No image, so no PATH: as under runc, the entry point must be a path.
    let container = Container::new("/tmp/plain").flag("--rootfs");
    let outcome = container.command(&["/bin/sh", "-c", "echo here > /made-in-guest; pwd"]).run().expect_code(0);
    assert_eq!(outcome.stdout, "/\n");
    assert_eq!(shell("cat /tmp/plain/made-in-guest; rm -r /tmp/plain").stdout, "here\n");
}

#[test]
fn container_may_change_its_root_as_it_likes() {
    let script = "set -e; cd /root; echo a > a; ln a b; ln -s a c; mkdir -p d/e; mv a d/e/a; \
                  test $(stat -c %h b) = 2; chown 5:6 b; test $(stat -c %u:%g d/e/a) = 5:6; \
                  mkfifo f; test -p f; dd if=/dev/zero of=sparse bs=1 count=1 seek=1000000 2>/dev/null; \
                  test $(stat -c %s sparse) = 1000001; rm -r d; test $(cat b) = a; truncate -s 0 b; \
                  test ! -s b; for i in $(seq 300); do echo $i > file$i; done; test $(ls file* | wc -l) = 300; \
                  rm file*; test $(ls | wc -l) = 4; echo fine";
    let outcome = Container::new(images::BUSYBOX).script(script).run().expect_code(0);
    assert_eq!(outcome.stdout, "fine\n");
}

#[test]
fn read_only_root_refuses_writes() {
    let container = Container::new(images::BUSYBOX).flag("--read-only");
    let outcome = container.script("echo x > /x || echo refused; echo y > /dev/null && echo fine").run().expect_code(0);
    assert_eq!(outcome.stdout, "refused\nfine\n");
}

#[test]
fn bind_mounts_bring_folders_and_files_of_the_host() {
    let _ = shell("mkdir -p /tmp/volume && echo one > /tmp/volume/one && echo single > /tmp/single").expect_code(0);
    let outcome = Container::new(images::BUSYBOX)
        .flag("--mount=type=bind,src=/tmp/volume,dst=/data,options=rbind:rw")
        .flag("--mount=type=bind,src=/tmp/single,dst=/etc/single,options=rbind:ro")
        .script("cat /data/one /etc/single; echo two > /data/two; echo x > /etc/single || echo refused")
        .run()
        .expect_code(0);
    assert_eq!(outcome.stdout, "one\nsingle\nrefused\n");
    assert_eq!(shell("cat /tmp/volume/two; rm -r /tmp/volume /tmp/single").stdout, "two\n");
}
