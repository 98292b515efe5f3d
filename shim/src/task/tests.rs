//! The verbs against a machine that obeys the test, and a recorder of events.

use std::{
    fs,
    os::{fd::OwnedFd, unix::fs::PermissionsExt},
    path::Path,
    time::Duration,
};

use agent_proto::CreateContainerRequest;
use tokio::{
    io::AsyncWriteExt,
    net::UnixStream,
    sync::{mpsc, oneshot},
};
use ttrpc::Code;
use vmm_api::ShareName;

use super::*;
use crate::{events::Item, io::Slot};

/// A machine without a machine: verbs succeed unless the test has left a failure for them.
#[derive(Default)]
struct Fake {
    failures: Mutex<HashMap<&'static str, EngineError>>,
    shares: Mutex<Vec<String>>,
    created: Mutex<Vec<CreateContainerRequest>>,
    signals: Mutex<Vec<(String, u32, bool)>>,
    slots: Mutex<HashMap<u32, oneshot::Sender<UnixStream>>>,
    exits: Mutex<HashMap<String, oneshot::Sender<Result<u32, EngineError>>>>,
    waits: Mutex<HashMap<String, oneshot::Receiver<Result<u32, EngineError>>>>,
    killed: Mutex<Option<String>>,
}

impl Fake {
    fn fail(&self, verb: &'static str, error: EngineError) {
        locked(&self.failures).insert(verb, error);
    }

    fn outcome(&self, verb: &'static str) -> Result<(), EngineError> {
        locked(&self.failures).get(verb).cloned().map_or(Ok(()), Err)
    }

    fn exit(&self, id: &str, outcome: Result<u32, EngineError>) {
        let sender = locked(&self.exits).remove(id).expect("container was created");
        let _ = sender.send(outcome);
    }

    fn guest_end(&self, port: u32) -> UnixStream {
        let (ours, guest) = UnixStream::pair().expect("socketpair");
        locked(&self.slots).remove(&port).expect("port is expected").send(ours).expect("slot is alive");
        guest
    }
}

impl Sandbox for Fake {
    async fn attach(&self, name: ShareName, _root: OwnedFd, _read_only: bool) -> Result<(), EngineError> {
        self.outcome("attach")?;
        locked(&self.shares).push(name.to_string());
        Ok(())
    }

    async fn detach(&self, name: ShareName) -> Result<(), EngineError> {
        locked(&self.shares).retain(|share| share != name.as_str());
        Ok(())
    }

    fn expect_stream(&self) -> (u32, Slot) {
        let (sender, slot) = oneshot::channel();
        let mut slots = locked(&self.slots);
        let port = 2048 + u32::try_from(slots.len()).expect("few");
        slots.insert(port, sender);
        (port, slot)
    }

    async fn create(&self, request: CreateContainerRequest) -> Result<(), EngineError> {
        self.outcome("create")?;
        let (sender, receiver) = oneshot::channel();
        locked(&self.exits).insert(request.id.clone(), sender);
        locked(&self.waits).insert(request.id.clone(), receiver);
        locked(&self.created).push(request);
        Ok(())
    }

    async fn start(&self, _id: &str) -> Result<(), EngineError> {
        self.outcome("start")
    }

    async fn signal(&self, id: &str, signal: u32, all: bool) -> Result<(), EngineError> {
        self.outcome("signal")?;
        locked(&self.signals).push((id.to_owned(), signal, all));
        Ok(())
    }

    async fn pause(&self, _id: &str) -> Result<(), EngineError> {
        self.outcome("pause")
    }

    async fn resume(&self, _id: &str) -> Result<(), EngineError> {
        self.outcome("resume")
    }

    async fn wait(&self, id: &str) -> Result<u32, EngineError> {
        let receiver = locked(&self.waits).remove(id).expect("one watcher a container");
        receiver.await.unwrap_or_else(|_| Err(EngineError::Ended("dropped".into())))
    }

    async fn delete(&self, _id: &str) -> Result<(), EngineError> {
        self.outcome("delete")
    }

    fn kill(&self, why: &str) {
        locked(&self.killed).get_or_insert_with(|| why.to_owned());
    }

    async fn stop(&self) {
        self.kill("stop");
    }
}

/// A pod with a fake machine, its bundles, and a script for a holder.
struct Pod {
    directory: tempfile::TempDir,
    fake: Arc<Fake>,
    tasks: Arc<Tasks<Fake>>,
    events: mpsc::Receiver<Item>,
}

impl Pod {
    fn new() -> Self {
        Self::grouped(false)
    }

    fn grouped(grouped: bool) -> Self {
        let directory = tempfile::tempdir().expect("temporary directory");
        let holder = directory.path().join("holder");
        fs::write(&holder, "#!/bin/sh\nprintf ok\nexec >&-\ncat >/dev/null\n").expect("write");
        fs::set_permissions(&holder, fs::Permissions::from_mode(0o755)).expect("chmod");
        let (queue, events) = Queue::new("default");
        let fake = Arc::new(Fake::default());
        let asked = Asked { annotations: [("dev.nacre.vcpus".into(), "2".into())].into(), ..Asked::default() };
        let tasks = Tasks::new(fake.clone(), queue, holder, asked, grouped);
        Self { directory, fake, tasks, events }
    }

    fn request(&self, id: &str) -> Create {
        let bundle = self.directory.path().join(id);
        fs::create_dir_all(bundle.join("rootfs")).expect("create");
        let config = r#"{"root":{"path":"rootfs"},"mounts":[{"type":"proc","source":"proc","destination":"/proc"},
            {"type":"bind","source":"/tmp","destination":"/v","options":["rbind","ro"]}]}"#;
        fs::write(bundle.join("config.json"), config).expect("write");
        Create { id: id.to_owned(), bundle, ..Create::default() }
    }

    async fn create(&self, id: &str) -> u32 {
        self.tasks.create(self.request(id)).await.expect("create")
    }

    fn topics(&mut self) -> Vec<String> {
        let mut topics = Vec::new();
        while let Ok(item) = self.events.try_recv() {
            match item {
                Item::Event(envelope) => topics.push(envelope.topic.replace("/tasks/", "")),
                Item::Flush(_) => {}
            }
        }
        topics
    }
}

fn refused(refusal: Refusal, text: &str) -> EngineError {
    EngineError::Guest(GuestError::Refused { refusal, text: text.to_owned() })
}

fn exists(pid: u32) -> bool {
    Path::new(&format!("/proc/{pid}")).exists()
}

#[tokio::test]
async fn life_of_a_container_from_create_to_delete() {
    let mut pod = Pod::new();
    let pid = pod.create("c1").await;
    assert!(exists(pid), "the task's pid is a living process");
    assert_eq!(pod.tasks.status("c1").expect("known").state, State::Created);
    assert_eq!(pod.tasks.start("c1").await.expect("start"), pid);
    assert_eq!(pod.tasks.status("c1").expect("known").state, State::Running);
    pod.fake.exit("c1", Ok(42));
    let exit = pod.tasks.wait("c1").await.expect("wait");
    assert_eq!(exit.status, 42);
    assert_eq!(pod.tasks.status("c1").expect("known").state, State::Stopped(exit));
    assert_eq!(pod.tasks.delete("c1").await.expect("delete"), (pid, exit));
    assert_eq!(pod.topics(), ["create", "start", "exit", "delete"]);
    assert!(!exists(pid) && locked(&pod.fake.shares).is_empty());
    assert!(matches!(pod.tasks.status("c1"), Err(TaskError::NotFound(_))));
}

#[tokio::test]
async fn agent_gets_the_shares_by_mount_index_and_the_root_by_name() {
    let pod = Pod::new();
    pod.create("c1").await;
    let created = locked(&pod.fake.created);
    let request = &created[0];
    assert_eq!(request.root_share, "r0");
    let shares: Vec<_> = request.share_mounts.iter().map(|mount| (mount.mount_index, mount.share.as_str())).collect();
    assert_eq!(shares, [(1, "v1")]);
    assert_eq!((request.stdio.stdin_port, request.stdio.stdout_port), (0, 0));
}

#[tokio::test]
async fn exit_during_start_is_reported_after_the_start() {
    let mut pod = Pod::new();
    pod.create("c1").await;
    let task = pod.tasks.find("c1").expect("known");
    let turn = task.turn.lock().await;
    let starting = tokio::spawn({
        let tasks = pod.tasks.clone();
        async move { tasks.start("c1").await }
    });
    tokio::task::yield_now().await;
    pod.fake.exit("c1", Ok(0));
    tokio::task::yield_now().await;
    drop(turn);
    starting.await.expect("join").expect("start");
    pod.tasks.wait("c1").await.expect("wait");
    assert_eq!(pod.topics(), ["create", "start", "exit"]);
}

#[tokio::test]
async fn every_waiter_hears_the_same_exit_even_when_it_comes_late() {
    let pod = Pod::new();
    pod.create("c1").await;
    pod.tasks.start("c1").await.expect("start");
    let waiters: Vec<_> = (0..5)
        .map(|_| {
            let tasks = pod.tasks.clone();
            tokio::spawn(async move { tasks.wait("c1").await })
        })
        .collect();
    tokio::task::yield_now().await;
    pod.fake.exit("c1", Ok(7));
    let late = pod.tasks.wait("c1").await.expect("wait");
    for waiter in waiters {
        assert_eq!(waiter.await.expect("join").expect("wait"), late);
    }
    assert_eq!(pod.tasks.wait("c1").await.expect("wait"), late);
}

#[tokio::test]
async fn all_output_is_delivered_before_the_exit_is_reported() {
    let pod = Pod::new();
    let output = pod.directory.path().join("out");
    let mut request = pod.request("c1");
    request.stdio.stdout = format!("file://{}", output.display());
    pod.tasks.create(request).await.expect("create");
    pod.tasks.start("c1").await.expect("start");
    let port = locked(&pod.fake.created)[0].stdio.stdout_port;
    let mut guest = pod.fake.guest_end(port);
    pod.fake.exit("c1", Ok(0));
    tokio::spawn(async move {
        tokio::time::sleep(Duration::from_millis(50)).await;
        guest.write_all(b"last line\n").await
    });
    pod.tasks.wait("c1").await.expect("wait");
    assert_eq!(fs::read_to_string(output).expect("read"), "last line\n");
}

#[tokio::test]
async fn running_container_is_not_deleted() {
    let pod = Pod::new();
    pod.create("c1").await;
    pod.tasks.start("c1").await.expect("start");
    let error = pod.tasks.delete("c1").await.expect_err("running");
    assert_eq!(error.code(), Code::FAILED_PRECONDITION);
    assert_eq!(pod.tasks.status("c1").expect("known").state, State::Running);
}

#[tokio::test]
async fn created_container_is_deleted_without_having_run() {
    let mut pod = Pod::new();
    pod.create("c1").await;
    let (_, exit) = pod.tasks.delete("c1").await.expect("delete");
    assert_eq!(exit.status, KILLED);
    assert_eq!(pod.topics(), ["create", "delete"]);
    assert!(matches!(pod.tasks.delete("c1").await, Err(TaskError::NotFound(_))));
}

#[tokio::test]
async fn start_is_legal_once_and_not_after_the_exit() {
    let pod = Pod::new();
    pod.create("c1").await;
    pod.tasks.start("c1").await.expect("start");
    assert_eq!(pod.tasks.start("c1").await.expect_err("twice").code(), Code::FAILED_PRECONDITION);
    pod.fake.exit("c1", Ok(0));
    pod.tasks.wait("c1").await.expect("wait");
    assert_eq!(pod.tasks.start("c1").await.expect_err("after exit").code(), Code::FAILED_PRECONDITION);
}

#[tokio::test]
async fn kill_is_never_silently_ignored() {
    let pod = Pod::new();
    assert_eq!(pod.tasks.kill("nobody", 9, false).await.expect_err("unknown").code(), Code::NOT_FOUND);
    pod.create("c1").await;
    pod.tasks.start("c1").await.expect("start");
    assert_eq!(pod.tasks.kill("c1", 65, false).await.expect_err("no such signal").code(), Code::INVALID_ARGUMENT);
    pod.tasks.kill("c1", 64, true).await.expect("kill");
    assert_eq!(*locked(&pod.fake.signals), [("c1".to_owned(), 64, true)]);
    pod.fake.fail("signal", refused(Refusal::NotFound, "gone"));
    let error = pod.tasks.kill("c1", 9, false).await.expect_err("finished in the guest");
    assert!(error.code() == Code::NOT_FOUND && error.to_string().contains("process already finished"));
    pod.fake.exit("c1", Ok(137));
    pod.tasks.wait("c1").await.expect("wait");
    let error = pod.tasks.kill("c1", 9, false).await.expect_err("finished");
    assert!(error.code() == Code::NOT_FOUND && error.to_string().contains("process already finished"));
}

#[tokio::test]
async fn sigkill_to_a_guest_that_hangs_kills_its_machine() {
    let pod = Pod::new();
    pod.create("c1").await;
    let hang = GuestError::Deadline { verb: "signal", id: "c1".into(), after: Duration::from_secs(5) };
    pod.fake.fail("signal", hang.into());
    assert_eq!(pod.tasks.kill("c1", 15, false).await.expect_err("hangs").code(), Code::DEADLINE_EXCEEDED);
    assert!(locked(&pod.fake.killed).is_none());
    pod.tasks.kill("c1", 9, false).await.expect("kill");
    assert!(locked(&pod.fake.killed).is_some());
}

#[tokio::test]
async fn paused_container_is_seen_as_such_until_it_goes_on() {
    let mut pod = Pod::new();
    pod.create("c1").await;
    assert_eq!(pod.tasks.pause("c1").await.expect_err("not running").code(), Code::FAILED_PRECONDITION);
    pod.tasks.start("c1").await.expect("start");
    assert_eq!(pod.tasks.resume("c1").await.expect_err("not paused").code(), Code::FAILED_PRECONDITION);
    pod.tasks.pause("c1").await.expect("pause");
    assert_eq!(pod.tasks.status("c1").expect("known").state, State::Paused);
    assert_eq!(pod.tasks.delete("c1").await.expect_err("paused").code(), Code::FAILED_PRECONDITION);
    pod.tasks.resume("c1").await.expect("resume");
    assert_eq!(pod.tasks.status("c1").expect("known").state, State::Running);
    assert_eq!(pod.topics(), ["create", "start", "paused", "resumed"]);
}

#[tokio::test]
async fn paused_container_can_be_killed_and_a_pause_that_failed_changes_nothing() {
    let pod = Pod::new();
    pod.create("c1").await;
    pod.tasks.start("c1").await.expect("start");
    pod.fake.fail("pause", refused(Refusal::Other, "the cgroup is gone"));
    pod.tasks.pause("c1").await.expect_err("refused");
    assert_eq!(pod.tasks.status("c1").expect("known").state, State::Running);
    locked(&pod.fake.failures).clear();
    pod.tasks.pause("c1").await.expect("pause");
    pod.tasks.kill("c1", 9, false).await.expect("kill");
    pod.fake.exit("c1", Ok(137));
    assert_eq!(pod.tasks.wait("c1").await.expect("wait").status, KILLED);
    pod.tasks.delete("c1").await.expect("delete");
}

#[tokio::test]
async fn last_container_is_deleted_with_a_machine_that_does_not_answer() {
    let pod = Pod::grouped(true);
    for id in ["c1", "c2"] {
        pod.create(id).await;
        pod.fake.exit(id, Ok(0));
        pod.tasks.wait(id).await.expect("wait");
    }
    let hang = GuestError::Deadline { verb: "delete", id: "c1".into(), after: Duration::from_secs(8) };
    pod.fake.fail("delete", hang.into());
    pod.tasks.delete("c1").await.expect("delete");
    assert!(locked(&pod.fake.killed).is_none(), "another container may still be well");
    pod.tasks.delete("c2").await.expect("delete");
    assert!(locked(&pod.fake.killed).is_some());
}

#[tokio::test]
async fn failed_exec_reports_one_exit_and_can_be_deleted() {
    let mut pod = Pod::new();
    pod.create("c1").await;
    pod.fake.fail("start", refused(Refusal::Other, "exec: \"nope\": executable file not found in $PATH"));
    let error = pod.tasks.start("c1").await.expect_err("no such program");
    assert!(error.to_string().contains("executable file not found"));
    assert_eq!(pod.tasks.wait("c1").await.expect("wait").status, 127);
    pod.fake.exit("c1", Ok(1));
    tokio::task::yield_now().await;
    pod.tasks.delete("c1").await.expect("delete");
    assert_eq!(pod.topics(), ["create", "exit", "delete"]);
}

#[tokio::test]
async fn end_of_the_machine_is_exit_137_and_delete_goes_on_without_it() {
    let mut pod = Pod::new();
    let ended = EngineError::Ended("the guest kernel panicked".into());
    pod.create("c1").await;
    pod.tasks.start("c1").await.expect("start");
    pod.fake.fail("delete", ended.clone());
    pod.fake.exit("c1", Err(ended));
    assert_eq!(pod.tasks.wait("c1").await.expect("wait").status, KILLED);
    pod.tasks.delete("c1").await.expect("delete");
    assert_eq!(pod.topics(), ["create", "start", "exit", "delete"]);
    assert!(pod.tasks.may_end());
}

#[tokio::test]
async fn failed_create_leaves_nothing_and_frees_the_id() {
    let mut pod = Pod::new();
    pod.fake.fail("create", EngineError::NotStarted("the guest kernel panicked".into()));
    let error = pod.tasks.create(pod.request("c1")).await.expect_err("no machine");
    assert_eq!(error.to_string(), "failed to start the sandbox VM: the guest kernel panicked");
    assert!(locked(&pod.fake.shares).is_empty() && pod.tasks.is_empty() && pod.topics().is_empty());
    locked(&pod.fake.failures).clear();
    pod.create("c1").await;
}

#[tokio::test]
async fn id_is_taken_until_it_is_deleted() {
    let pod = Pod::new();
    pod.create("c1").await;
    assert_eq!(pod.tasks.create(pod.request("c1")).await.expect_err("taken").code(), Code::ALREADY_EXISTS);
}

#[tokio::test]
async fn terminal_and_checkpoint_are_refused_by_name() {
    let pod = Pod::new();
    let terminal = pod.tasks.create(Create { terminal: true, ..pod.request("c1") }).await.expect_err("refused");
    assert!(terminal.code() == Code::UNIMPLEMENTED && terminal.to_string().contains("terminal"));
    let checkpoint = Create { checkpoint: "/c".into(), ..pod.request("c1") };
    assert_eq!(pod.tasks.create(checkpoint).await.expect_err("refused").code(), Code::UNIMPLEMENTED);
    assert!(pod.tasks.is_empty());
}

#[tokio::test]
async fn pod_may_end_only_when_no_container_is_left() {
    let pod = Pod::grouped(true);
    assert!(pod.tasks.may_end());
    pod.create("c1").await;
    pod.create("c2").await;
    assert!(!pod.tasks.may_end());
    pod.tasks.delete("c1").await.expect("delete");
    assert!(!pod.tasks.may_end());
    pod.tasks.delete("c2").await.expect("delete");
    assert!(pod.tasks.may_end());
}

#[tokio::test]
async fn close_io_is_harmless_at_any_time() {
    let pod = Pod::new();
    assert!(matches!(pod.tasks.close_stdin("c1"), Err(TaskError::NotFound(_))));
    pod.create("c1").await;
    pod.tasks.close_stdin("c1").expect("no stdin at all");
    pod.tasks.close_stdin("c1").expect("again");
}

#[tokio::test]
async fn annotations_that_the_machine_was_not_built_for_are_refused_and_its_own_are_fine() {
    let pod = Pod::grouped(true);
    for (id, annotation, fits) in [("c1", r#""dev.nacre.vcpus":"2""#, true), ("c2", r#""dev.nacre.vcpus":"4""#, false)]
    {
        let request = pod.request(id);
        let config = format!(r#"{{"root":{{"path":"rootfs"}},"annotations":{{{annotation},"other":"x"}}}}"#);
        fs::write(request.bundle.join("config.json"), config).expect("write");
        let created = pod.tasks.create(request).await;
        match created {
            Ok(_) => assert!(fits),
            Err(error) => {
                let text = error.to_string();
                assert!(
                    !fits && text.contains("dev.nacre.vcpus = \"4\"") && text.contains("first container"),
                    "{text}"
                );
                assert_eq!(error.code(), Code::INVALID_ARGUMENT);
            }
        }
    }
}
