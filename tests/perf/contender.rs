//! Who runs against whom: the same image, the same command, each by its own product.

use std::process::{Command, Stdio};

/// One way to run a container to its end.
pub struct Contender {
    /// Its name in tables.
    pub name: &'static str,
    /// The command; `{id}` becomes an id of the run's own.
    words: &'static [&'static str],
    /// How many of its runs are counted for each that is asked for.
    pub times: usize,
}

const IMAGE: &str = "nacre.test/busybox:latest";

const OURS: &str = "nacre";

/// All contenders; the first is ours.
pub const ALL: [Contender; 3] = [
    Contender {
        name: OURS,
        words: &["ctr", "run", "--rm", "--runtime", tests::RUNTIME, IMAGE, "{id}", "true"],
        times: 1,
    },
    Contender {
        name: "runc",
        words: &["ctr", "run", "--rm", "--runtime", "io.containerd.runc.v2", IMAGE, "{id}", "true"],
        times: 1,
    },
    // Its runs are of two lengths, 449 and 470 virtual ms, about as often one as the other: the middle takes more of them.
    Contender { name: "pvisor", words: &["pvisor", "run", "--rm", "--network", "none", IMAGE, "true"], times: 2 },
];

impl Contender {
    /// Whether this is nacre, of which phases are known and to which nothing is forgiven.
    pub fn ours(&self) -> bool {
        self.name == OURS
    }

    /// Runs it once, with nothing of it on the terminal.
    pub fn run(&self, id: &str) -> Result<(), String> {
        let words: Vec<String> = self.words.iter().map(|word| word.replace("{id}", id)).collect();
        let output = Command::new(&words[0])
            .args(&words[1..])
            .stdin(Stdio::null())
            .output()
            .map_err(|error| format!("cannot run {}: {error}", words[0]))?;
        if output.status.success() {
            return Ok(());
        }
        Err(format!("{} failed: {}", words.join(" "), String::from_utf8_lossy(&output.stderr)))
    }
}
