//! The command line, as containerd writes it.
//!
//! Flags follow Go's `flag` package: one dash or two, `-key value` or `-key=value`. Daemons have added flags over time,
//! so an unknown one is skipped, with its value if it seems to have one. Parsing cannot fail.

/// What containerd said on the command line.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Flags {
    /// Namespace of the container.
    pub namespace: String,
    /// Id of the container.
    pub id: String,
    /// containerd's gRPC address.
    pub address: String,
    /// The bundle; only given to `delete`.
    pub bundle: String,
    /// Ours, from `start` to the server: the path of the listening socket.
    pub socket: String,
    /// Ours, from `start` to the server: the pod shares its VM under this name.
    pub group: String,
    /// Log more.
    pub debug: bool,
    /// Print the version.
    pub version: bool,
    /// Print a `RuntimeInfo`.
    pub info: bool,
    /// `start`, `delete` or nothing.
    pub action: String,
}

impl Flags {
    /// Reads the arguments after the program's name.
    pub fn parse(args: impl IntoIterator<Item = String>) -> Self {
        let mut flags = Self::default();
        let mut args = args.into_iter().peekable();
        while let Some(arg) = args.next() {
            let Some(flag) = arg.strip_prefix("--").or_else(|| arg.strip_prefix('-')) else {
                flags.action = arg;
                break;
            };
            let (name, inline) = match flag.split_once('=') {
                Some((name, value)) => (name, Some(value.to_owned())),
                None => (flag, None),
            };
            if let Some(switch) = flags.switch(name) {
                *switch = inline.as_deref() != Some("false");
            } else if let Some(slot) = flags.slot(name) {
                *slot = inline.or_else(|| args.next()).unwrap_or_default();
            } else if inline.is_none() {
                // Unknown, and maybe followed by its value: an action is never one.
                args.next_if(|next| !next.starts_with('-') && next != "start" && next != "delete");
            }
        }
        flags
    }

    fn switch(&mut self, name: &str) -> Option<&mut bool> {
        match name {
            "debug" => Some(&mut self.debug),
            "v" | "version" => Some(&mut self.version),
            "info" => Some(&mut self.info),
            _ => None,
        }
    }

    fn slot(&mut self, name: &str) -> Option<&mut String> {
        match name {
            "namespace" => Some(&mut self.namespace),
            "id" => Some(&mut self.id),
            "address" => Some(&mut self.address),
            "bundle" => Some(&mut self.bundle),
            "socket" => Some(&mut self.socket),
            "group" => Some(&mut self.group),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Flags {
        Flags::parse(line.split(' ').map(str::to_owned))
    }

    #[test]
    fn containerds_own_line_is_understood() {
        let flags = parse(
            "-namespace k8s.io -address /run/containerd/containerd.sock -publish-binary /usr/bin/containerd -id c1 -debug start",
        );
        assert_eq!((flags.namespace.as_str(), flags.id.as_str()), ("k8s.io", "c1"));
        assert_eq!(flags.address, "/run/containerd/containerd.sock");
        assert!(flags.debug);
        assert_eq!(flags.action, "start");
    }

    #[test]
    fn both_dashes_and_both_forms_are_accepted() {
        let flags = parse("--id=c1 --namespace default -bundle=/b delete");
        assert_eq!((flags.id.as_str(), flags.namespace.as_str()), ("c1", "default"));
        assert_eq!((flags.bundle.as_str(), flags.action.as_str()), ("/b", "delete"));
    }

    #[test]
    fn unknown_flags_of_any_shape_are_skipped() {
        for line in ["-new -id c1 start", "-new value -id c1 start", "-new=value -id c1 start", "-id c1 -new start"] {
            let flags = parse(line);
            assert_eq!((flags.id.as_str(), flags.action.as_str()), ("c1", "start"), "{line}");
        }
    }

    #[test]
    fn no_action_means_the_server() {
        assert_eq!(parse("-id c1").action, "");
        assert!(parse("-v").version && parse("-info").info);
    }
}
