//! The OCI runtime spec: what the host acts on, and what is left of it for the guest.
//!
//! It is kept as JSON instead of typed, so that fields which nobody here knows reach the agent unchanged. What stays
//! behind: hooks (they are for the host), paths of host namespaces, SELinux and AppArmor labels (the guest kernel has
//! neither). The network namespace is the VM itself: its NICs are the pod's.
//!
//! Invariant: entries of `mounts` keep their order and number, because the agent finds a share's mount by its index.

use std::{
    collections::BTreeMap,
    fs, io,
    os::{fd::OwnedFd, unix::fs::FileTypeExt},
    path::{Path, PathBuf},
};

use rustix::fs::{Mode, OFlags, open};
use serde_json::Value;
use share_mount::{Access, ShareMountError};

use crate::{
    bundle::{Bundle, CONFIG},
    holder::Network,
};

/// Host directories that only make sense as the guest's own: the guest has its own of each.
const GUEST_OWN: [&str; 3] = ["/proc", "/sys", "/dev"];

/// Why a spec cannot be acted on.
#[derive(Debug, thiserror::Error)]
pub enum SpecError {
    /// The file cannot be read.
    #[error("cannot read the OCI spec {}: {source}", file.display())]
    Unreadable {
        /// The file.
        file: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// The file is not JSON.
    #[error("the OCI spec {} is malformed: {source}", file.display())]
    Malformed {
        /// The file.
        file: PathBuf,
        /// The reason.
        source: serde_json::Error,
    },
    /// A field that must be there is not.
    #[error("the OCI spec lacks {0}")]
    Missing(&'static str),
    /// A volume's source.
    #[error("cannot open {}, the source of the mount on {destination}: {source}", path.display())]
    MountSource {
        /// On the host.
        path: PathBuf,
        /// In the container.
        destination: String,
        /// The reason.
        source: io::Error,
    },
    /// The source cannot be handed to a VMM.
    #[error(transparent)]
    Share(#[from] ShareMountError),
    /// An annotation that comes too late.
    #[error(
        "annotation {name} = {value:?} asks for another machine than the one that the pod's first container has got; \
         set it on the pod"
    )]
    Late {
        /// The annotation.
        name: String,
        /// What it says.
        value: String,
    },
    /// Something that the guest cannot have.
    #[error("{0}")]
    Unsupported(String),
}

/// One container's spec.
#[derive(Debug, Clone)]
pub struct Spec(Value);

/// A bind mount whose source is on the host.
#[derive(Debug)]
pub struct BindMount {
    /// Index in the spec's `mounts`.
    pub index: u32,
    /// Its source, as a detached mount.
    pub source: OwnedFd,
    /// No writes.
    pub read_only: bool,
}

impl Spec {
    /// Reads the bundle's spec.
    pub fn read(bundle: &Bundle) -> Result<Self, SpecError> {
        let file = bundle.path(CONFIG);
        let bytes = fs::read(&file).map_err(|source| SpecError::Unreadable { file: file.clone(), source })?;
        serde_json::from_slice(&bytes).map(Self).map_err(|source| SpecError::Malformed { file, source })
    }

    /// The directory that is the root if containerd gave no mounts.
    pub fn root(&self, bundle: &Bundle) -> Result<PathBuf, SpecError> {
        let path = self.0.pointer("/root/path").and_then(Value::as_str);
        path.map(|path| bundle.path(path)).ok_or(SpecError::Missing("root.path"))
    }

    /// The cgroup that the host accounts the container in; empty if the spec names none.
    #[must_use]
    pub fn cgroups_path(&self) -> &str {
        self.0.pointer("/linux/cgroupsPath").and_then(Value::as_str).unwrap_or_default()
    }

    /// The network namespace that the holder is to live in.
    #[must_use]
    pub fn network(&self) -> Network {
        match self.namespaces().find(|namespace| kind(namespace) == "network") {
            None => Network::Host,
            Some(namespace) => match path(namespace) {
                Some(path) => Network::At(path.into()),
                None => Network::New,
            },
        }
    }

    /// The bind mounts that need a share, each with its source open.
    pub fn bind_mounts(&self, bundle: &Bundle) -> Result<Vec<BindMount>, SpecError> {
        let mounts = self.0.get("mounts").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        let mut binds = Vec::new();
        for (index, mount) in (0..).zip(mounts) {
            let options =
                || mount.get("options").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str);
            let is_bind = text(mount, "type") == "bind" || options().any(|option| matches!(option, "bind" | "rbind"));
            let source = bundle.path(text(mount, "source"));
            if !is_bind || GUEST_OWN.iter().any(|own| source.starts_with(own)) {
                continue;
            }
            let read_only = options().any(|option| option == "ro");
            let recursive = options().any(|option| option == "rbind");
            let opened = open_source(&source, text(mount, "destination"))?;
            let source = share_mount::detach(&opened, &source, Access { read_only, recursive })?;
            binds.push(BindMount { index, source, read_only });
        }
        Ok(binds)
    }

    /// Refuses annotations that the pod's machine was not built for: it cannot be changed any more.
    pub fn must_fit(&self, built_for: &BTreeMap<String, String>) -> Result<(), SpecError> {
        let annotations = self.0.get("annotations").and_then(Value::as_object).into_iter().flatten();
        for (name, value) in annotations.filter(|(name, _)| name.starts_with(config::annotations::PREFIX)) {
            let value = value.as_str().unwrap_or_default();
            if built_for.get(name).map(String::as_str) != Some(value) {
                return Err(SpecError::Late { name: name.clone(), value: value.to_owned() });
            }
        }
        Ok(())
    }

    /// What the agent gets.
    pub fn for_guest(&self) -> Result<Vec<u8>, SpecError> {
        let mut spec = self.0.clone();
        for (parent, key) in
            [("", "hooks"), ("/process", "selinuxLabel"), ("/process", "apparmorProfile"), ("/linux", "mountLabel")]
        {
            if let Some(parent) = spec.pointer_mut(parent).and_then(Value::as_object_mut) {
                parent.remove(key);
            }
        }
        if let Some(namespaces) = spec.pointer_mut("/linux/namespaces").and_then(Value::as_array_mut) {
            namespaces.retain(|namespace| kind(namespace) != "network");
            for namespace in namespaces.iter_mut().filter(|namespace| path(namespace).is_some()) {
                // That there is one means "the pod's" to the agent; which it is on the host is not the guest's business.
                namespace["path"] = "pod".into();
            }
        }
        Ok(spec.to_string().into_bytes())
    }

    fn namespaces(&self) -> impl Iterator<Item = &Value> {
        self.0.pointer("/linux/namespaces").and_then(Value::as_array).into_iter().flatten()
    }
}

fn kind(namespace: &Value) -> &str {
    text(namespace, "type")
}

fn path(namespace: &Value) -> Option<&str> {
    Some(text(namespace, "path")).filter(|path| !path.is_empty())
}

fn text<'a>(object: &'a Value, key: &str) -> &'a str {
    object.get(key).and_then(Value::as_str).unwrap_or_default()
}

fn open_source(path: &Path, destination: &str) -> Result<OwnedFd, SpecError> {
    let failed = |source| SpecError::MountSource { path: path.to_owned(), destination: destination.to_owned(), source };
    let kind = fs::metadata(path).map_err(failed)?.file_type();
    if kind.is_socket() || kind.is_char_device() || kind.is_block_device() {
        return Err(SpecError::Unsupported(format!(
            "{}, the source of the mount on {destination}, is a socket or a device, which cannot be shared with a VM",
            path.display()
        )));
    }
    open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).map_err(|errno| failed(errno.into()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    fn spec(text: &str) -> Spec {
        Spec(serde_json::from_str(text).expect("JSON"))
    }

    fn bundle() -> Bundle {
        Bundle::new("/nonexistent/bundle")
    }

    #[test]
    fn network_follows_the_namespace_entry() {
        assert_eq!(spec("{}").network(), Network::Host);
        assert_eq!(spec(r#"{"linux":{"namespaces":[{"type":"network"}]}}"#).network(), Network::New);
        let joined = spec(r#"{"linux":{"namespaces":[{"type":"network","path":"/run/netns/a"}]}}"#);
        assert_eq!(joined.network(), Network::At("/run/netns/a".into()));
    }

    #[test]
    fn guest_gets_everything_but_what_belongs_to_the_host() {
        let spec = spec(
            r#"{"hooks":{"prestart":[]},"future":1,"process":{"args":["a"],"apparmorProfile":"x"},
            "linux":{"namespaces":[{"type":"uts"},{"type":"network"},{"type":"ipc","path":"/proc/1/ns/ipc"}]}}"#,
        );
        let guest: Value = serde_json::from_slice(&spec.for_guest().expect("legal")).expect("JSON");
        let namespaces = r#"[{"type":"uts"},{"type":"ipc","path":"pod"}]"#;
        let expected = format!(r#"{{"future":1,"process":{{"args":["a"]}},"linux":{{"namespaces":{namespaces}}}}}"#);
        assert_eq!(guest, serde_json::from_str::<Value>(&expected).expect("JSON"));
    }

    #[test]
    fn only_binds_of_host_files_become_shares_and_keep_their_index() {
        let spec = spec(
            r#"{"mounts":[{"type":"proc","source":"proc","destination":"/proc"},
            {"type":"bind","source":"/tmp","destination":"/a","options":["rbind","ro"]},
            {"type":"bind","source":"/dev/null","destination":"/b"},
            {"type":"none","source":"/etc/hostname","destination":"/c","options":["bind"]}]}"#,
        );
        let binds = spec.bind_mounts(&bundle()).expect("all exist");
        let found: Vec<_> = binds.iter().map(|bind| (bind.index, bind.read_only)).collect();
        assert_eq!(found, [(1, true), (3, false)]);
    }

    #[test]
    fn missing_source_is_named() {
        let spec = spec(r#"{"mounts":[{"type":"bind","source":"/nonexistent/v","destination":"/v"}]}"#);
        let text = spec.bind_mounts(&bundle()).expect_err("absent").to_string();
        assert!(text.contains("/nonexistent/v") && text.contains("mount on /v"), "{text}");
    }

    #[test]
    fn socket_is_refused_in_words() {
        let directory = tempfile::tempdir().expect("temporary directory");
        let socket = directory.path().join("docker.sock");
        let _listener = UnixListener::bind(&socket).expect("bind");
        let spec =
            spec(&format!(r#"{{"mounts":[{{"type":"bind","source":"{}","destination":"/s"}}]}}"#, socket.display()));
        assert!(matches!(spec.bind_mounts(&bundle()), Err(SpecError::Unsupported(_))));
    }
}
