//! The one call that `ctr` has no word for: creating a task without starting it. CRI and Docker do that.
//!
//! gRPC is HTTP/2 with a five-byte frame around a protobuf message; the lab has curl, and the message has four strings.

use std::{fs, process::Command};

use crate::Outcome;

/// Creates the task of a container whose root is a plain folder (so that there is nothing to mount).
///
/// `fifos` are the names of stdin, stdout and stderr. The exit code is gRPC's status; stderr has its message.
#[must_use]
pub fn create_task(id: &str, fifos: [&str; 3]) -> Outcome {
    let mut message = Vec::new();
    for (field, text) in [(1, id), (4, fifos[0]), (5, fifos[1]), (6, fifos[2])] {
        message.extend([field << 3 | 2, u8::try_from(text.len()).expect("short")]);
        message.extend(text.as_bytes());
    }
    let mut frame = vec![0];
    frame.extend(u32::try_from(message.len()).expect("short").to_be_bytes());
    frame.extend(message);
    fs::write("/tmp/frame", frame).expect("/tmp is writable");
    let output = Command::new("curl")
        .args([
            "-sS",
            "--http2-prior-knowledge",
            "--max-time",
            "100",
            "--unix-socket",
            "/run/containerd/containerd.sock",
        ])
        .args(["-H", "content-type: application/grpc", "-H", "te: trailers", "-H", "containerd-namespace: default"])
        .args(["--data-binary", "@/tmp/frame", "-D", "-", "-o", "/dev/null"])
        .arg("http://localhost/containerd.services.tasks.v1.Tasks/Create")
        .output()
        .expect("curl runs");
    let headers = String::from_utf8_lossy(&output.stdout).into_owned();
    let value = |name: &str| headers.lines().find_map(|line| line.strip_prefix(name).map(str::trim));
    let code = value("grpc-status:").and_then(|code| code.parse().ok()).unwrap_or(-1);
    let stderr = format!("{} {}", value("grpc-message:").unwrap_or_default(), String::from_utf8_lossy(&output.stderr));
    Outcome { code, stdout: headers.clone(), stderr }
}
