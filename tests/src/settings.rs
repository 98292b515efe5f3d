//! `/etc/nacre/config.toml` for the length of one test.

use std::{fs, path::PathBuf};

const FILE: &str = "/etc/nacre/config.toml";

/// Settings that are in force until this is dropped.
#[derive(Debug)]
pub struct Settings {
    before: Option<Vec<u8>>,
}

impl Settings {
    /// Puts `toml` in force.
    #[must_use]
    pub fn with(toml: &str) -> Self {
        let before = fs::read(FILE).ok();
        fs::create_dir_all("/etc/nacre").expect("/etc is writable in the lab");
        fs::write(FILE, toml).expect("/etc/nacre is writable in the lab");
        Self { before }
    }

    /// Puts in force a configuration whose `key` under `[paths]` names a file with `content`.
    #[must_use]
    pub fn with_image(key: &str, content: &[u8]) -> Self {
        let path = PathBuf::from(format!("/tmp/{key}.image"));
        fs::write(&path, content).expect("/tmp is writable");
        Self::with(&format!("[paths]\n{key} = {path:?}\n"))
    }
}

impl Drop for Settings {
    fn drop(&mut self) {
        match &self.before {
            Some(bytes) => fs::write(FILE, bytes).expect("the settings can be put back"),
            None => fs::remove_file(FILE).expect("the settings can be removed"),
        }
    }
}
