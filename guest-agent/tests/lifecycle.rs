//! A container from Create to Delete: its program, its streams, its end (see [`guest`]).

mod guest;

use std::{fs, os::unix::fs::PermissionsExt, time::Duration};

use agent_proto::{ListProcessesRequest, PauseContainerRequest, ResumeContainerRequest, SignalContainerRequest};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use ttrpc::{Code, context};

use guest::{Guest, spec, with_guest};

impl Guest {
    async fn signal(&self, id: &str, signal: u32, all: bool) -> ttrpc::Result<()> {
        let request = SignalContainerRequest { id: id.into(), signal, all, ..Default::default() };
        self.agent.signal_container(context::with_timeout(0), &request).await.map(drop)
    }

    async fn freeze(&self, id: &str, frozen: bool) -> ttrpc::Result<()> {
        let (pause, resume) = (
            PauseContainerRequest { id: id.into(), ..Default::default() },
            ResumeContainerRequest { id: id.into(), ..Default::default() },
        );
        let done = match frozen {
            true => self.agent.pause_container(context::with_timeout(0), &pause).await,
            false => self.agent.resume_container(context::with_timeout(0), &resume).await,
        };
        done.map(drop)
    }
}

/// The code and the words of a refusal.
fn rpc(result: ttrpc::Result<impl Sized>) -> (Code, String) {
    match result.err().expect("must fail") {
        ttrpc::Error::RpcStatus(status) => (status.code(), status.message().to_owned()),
        other => panic!("{other}"),
    }
}

#[test]
fn output_errors_and_status_come_back() {
    with_guest(|guest| async move {
        assert_eq!(guest.sh("echo out; echo err >&2; exit 42").await, ("out\n".into(), "err\n".into(), 42));
        assert_eq!(guest.run("c2", &spec(&["true"])).await, (String::new(), String::new(), 0));
    });
}

#[test]
fn a_missing_entry_point_is_told_at_create_in_the_words_of_runc() {
    with_guest(|guest| async move {
        let prefix = "OCI runtime create failed: unable to start container process: exec: ";
        for (name, code, text) in [
            ("nope", Code::NOT_FOUND, r#""nope": executable file not found in $PATH"#),
            ("/no/such", Code::NOT_FOUND, r#""/no/such": stat /no/such: no such file or directory"#),
            ("/bin", Code::PERMISSION_DENIED, r#""/bin": is a directory"#),
            ("/bin/plain", Code::PERMISSION_DENIED, r#""/bin/plain": permission denied"#),
        ] {
            assert_eq!(rpc(guest.create("c1", &spec(&[name])).await), (code, format!("{prefix}{text}")));
        }
        // Nothing is left behind: the id is free.
        assert_eq!(guest.sh("echo fine").await.0, "fine\n");
    });
}

#[test]
fn a_program_that_the_kernel_refuses_is_told_at_start() {
    with_guest(|guest| async move {
        fs::set_permissions(guest.root().join("bin/plain"), fs::Permissions::from_mode(0o755)).expect("mode");
        let _streams = guest.create("c1", &spec(&["/bin/plain"])).await.expect("create");
        let (_, text) = rpc(guest.go("c1").await);
        assert_eq!(
            text,
            "OCI runtime start failed: unable to start container process: exec /bin/plain: exec format error"
        );
        assert_eq!(guest.wait("c1").await, 127);
        guest.delete("c1").await;
    });
}

#[test]
fn input_reaches_the_process_until_it_is_half_closed() {
    with_guest(|guest| async move {
        let mut streams = guest.create("c1", &spec(&["cat"])).await.expect("create");
        guest.go("c1").await.expect("start");
        streams.stdin.write_all(b"one\n").await.expect("write");
        let mut line = [0; 4];
        streams.stdout.read_exact(&mut line).await.expect("read");
        assert_eq!(&line, b"one\n");
        streams.stdin.shutdown().await.expect("half-close");
        assert_eq!(guest.wait("c1").await, 0);
        guest.delete("c1").await;
    });
}

#[test]
fn a_waiting_sibling_does_not_hold_the_end_of_input_back() {
    with_guest(|guest| async move {
        let mut streams = guest.create("c1", &spec(&["cat"])).await.expect("create");
        guest.go("c1").await.expect("start");
        let _created_only = guest.create("c2", &spec(&["true"])).await.expect("create");
        streams.stdin.shutdown().await.expect("half-close");
        assert_eq!(guest.wait("c1").await, 0);
        guest.delete("c2").await;
        guest.delete("c1").await;
    });
}

#[test]
fn a_slow_reader_gets_every_byte_before_wait_returns() {
    with_guest(|guest| async move {
        let mut streams =
            guest.create("c1", &spec(&["dd", "if=/dev/zero", "bs=64k", "count=64"])).await.expect("create");
        guest.go("c1").await.expect("start");
        let wait = guest.wait("c1");
        tokio::pin!(wait);
        let early = tokio::time::timeout(Duration::from_millis(300), &mut wait).await;
        assert!(early.is_err(), "nothing was read, yet the output counts as written");
        let mut all = Vec::new();
        let (read, status) = tokio::join!(streams.stdout.read_to_end(&mut all), wait);
        assert_eq!((read.expect("read"), status), (4 * 1024 * 1024, 0));
        guest.delete("c1").await;
    });
}

#[test]
fn signals_reach_init_and_what_is_gone_is_not_found() {
    with_guest(|guest| async move {
        let _streams = guest.create("c1", &spec(&["sleep", "1000"])).await.expect("create");
        let early = guest.wait("c1");
        assert_eq!(rpc(guest.go("nope").await).0, Code::NOT_FOUND);
        guest.go("c1").await.expect("start");
        assert_eq!(rpc(guest.go("c1").await).0, Code::FAILED_PRECONDITION);
        guest.signal("c1", 0, false).await.expect("alive");
        assert_eq!(rpc(guest.signal("c1", 65, false).await).0, Code::INVALID_ARGUMENT);
        let pids = ListProcessesRequest { id: "c1".into(), ..Default::default() };
        assert_eq!(guest.agent.list_processes(context::with_timeout(0), &pids).await.expect("list").pids.len(), 1);
        guest.signal("c1", 9, true).await.expect("kill");
        assert_eq!(early.await, 137);
        assert_eq!(guest.wait("c1").await, 137);
        assert_eq!(rpc(guest.signal("c1", 15, false).await), (Code::NOT_FOUND, "process already finished".into()));
        assert_eq!(rpc(guest.signal("c9", 15, false).await), (Code::NOT_FOUND, r#"container not found: "c9""#.into()));
        guest.delete("c1").await;
        guest.delete("c1").await;
    });
}

#[test]
fn a_container_can_be_deleted_in_any_state_and_its_waiters_are_answered() {
    with_guest(|guest| async move {
        let _created = guest.create("c1", &spec(&["sleep", "1000"])).await.expect("create");
        assert_eq!(rpc(guest.create("c1", &spec(&["true"])).await).0, Code::ALREADY_EXISTS);
        guest.delete("c1").await;
        let _running = guest.create("c1", &spec(&["sh", "-c", "sleep 1000 & sleep 1000"])).await.expect("create");
        guest.go("c1").await.expect("start");
        let (status, ()) = tokio::join!(guest.wait("c1"), guest.delete("c1"));
        assert_eq!(status, 137);
    });
}

#[test]
fn a_paused_container_stands_still_and_can_be_resumed_killed_and_deleted() {
    with_guest(|guest| async move {
        let mut streams =
            guest.create("c1", &spec(&["sh", "-c", "while read x; do echo $x; done"])).await.expect("create");
        guest.go("c1").await.expect("start");
        guest.freeze("c1", true).await.expect("pause");
        streams.stdin.write_all(b"one\n").await.expect("write");
        let mut line = [0; 4];
        let early = tokio::time::timeout(Duration::from_millis(300), streams.stdout.read_exact(&mut line)).await;
        assert!(early.is_err(), "a paused process answered");
        guest.freeze("c1", false).await.expect("resume");
        streams.stdout.read_exact(&mut line).await.expect("read");
        assert_eq!(&line, b"one\n");
        guest.freeze("c1", true).await.expect("pause");
        guest.signal("c1", 9, false).await.expect("kill");
        assert_eq!(guest.wait("c1").await, 137);
        assert_eq!(rpc(guest.freeze("c1", true).await).0, Code::NOT_FOUND);
        guest.delete("c1").await;
        let _streams = guest.create("c1", &spec(&["sleep", "1000"])).await.expect("create");
        guest.go("c1").await.expect("start");
        guest.freeze("c1", true).await.expect("pause");
        guest.delete("c1").await;
    });
}
