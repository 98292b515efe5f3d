//! What a VMM finds out about its host when it is executed as `nacre-vmm --probe` with an open `/dev/kvm` as its standard
//! input: one line of JSON on its standard output, and exit code 0 whatever it says. It may hang if KVM does; whoever asks
//! bounds the wait.

use serde::{Deserialize, Serialize};

/// The one argument.
pub const PROBE_FLAG: &str = "--probe";

/// How a tiny guest fared.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "probe", rename_all = "snake_case")]
pub enum Probe {
    /// It ran to its end.
    Ran {
        /// Instructions that were timed, all of them in the guest's kernel mode.
        instructions: u64,
        /// Nanoseconds that they took.
        ns: u64,
    },
    /// KVM gave up on it while it ran.
    Stopped {
        /// Where, and what KVM said.
        message: String,
        /// Instructions that were timed.
        instructions: u64,
        /// Nanoseconds that they took; 0 if the guest did not come so far.
        ns: u64,
    },
    /// No machine could be made.
    Refused {
        /// Why.
        message: String,
    },
}

impl Probe {
    /// The line.
    #[must_use]
    pub fn to_line(&self) -> String {
        // Numbers and strings: nothing in it can fail to be JSON.
        serde_json::to_string(self).unwrap_or_default()
    }

    /// Reads the line.
    pub fn parse(line: &str) -> Result<Self, serde_json::Error> {
        serde_json::from_str(line)
    }

    /// Instructions a second, if there was something to time.
    #[must_use]
    pub fn rate(&self) -> Option<u64> {
        match self {
            Self::Ran { instructions, ns } | Self::Stopped { instructions, ns, .. } => {
                instructions.checked_mul(1_000_000_000)?.checked_div(*ns)
            }
            Self::Refused { .. } => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wire_form_is_frozen() {
        let ran = Probe::Ran { instructions: 200_000, ns: 50_000 };
        assert_eq!(ran.to_line(), r#"{"probe":"ran","instructions":200000,"ns":50000}"#);
        assert_eq!(Probe::parse(&ran.to_line()).expect("parses"), ran);
        assert_eq!(ran.rate(), Some(4_000_000_000));
    }

    #[test]
    fn nothing_timed_has_no_rate() {
        assert_eq!(Probe::Stopped { message: String::new(), instructions: 1, ns: 0 }.rate(), None);
        assert_eq!(Probe::Refused { message: String::new() }.rate(), None);
    }
}
