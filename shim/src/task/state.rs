//! Where a container is in its life, and which steps are legal.
//!
//! ```text
//!   Creating ──prepared──► Created ──started──► Running ──paused──► Paused
//!      │                      │  └──exited──┐      │ ▲───resumed───────┘ │
//!      │                      │             ▼      ▼exited              │exited
//!      │                      │            Stopped(exit) ◄──────────────┘
//!      └──────removed─────────┴──removed──►   │removed
//!                               Gone ◄────────┘
//! ```
//!
//! `Created → Stopped` is an init that was killed, or could not be executed, before it ran. `Running → Gone` does not
//! exist: a running container must be killed first. An illegal step changes nothing.

use std::time::SystemTime;

/// How and when a container ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exit {
    /// 0 to 255; 128 + signal.
    pub status: u32,
    /// Host clock.
    pub at: SystemTime,
}

impl Exit {
    /// An end that happens now.
    #[must_use]
    pub fn now(status: u32) -> Self {
        Self { status, at: SystemTime::now() }
    }
}

/// Where it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Its id is taken, and nothing can be asked of it yet.
    Creating,
    /// Prepared up to its exec.
    Created,
    /// Its entry point runs.
    Running,
    /// Its processes stand where they were.
    Paused,
    /// It has ended.
    Stopped(Exit),
    /// It does not exist any more.
    Gone,
}

/// What happens to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// The guest has prepared it.
    Prepared,
    /// The guest has executed it.
    Started,
    /// The guest has stopped its processes.
    Paused,
    /// The guest lets them go on.
    Resumed,
    /// It has ended.
    Exited(Exit),
    /// Its remains have been removed, or it could not be created.
    Removed,
}

impl State {
    /// The state after `step`, or `None` if the step is not legal here.
    #[must_use]
    pub fn after(self, step: Step) -> Option<Self> {
        match (self, step) {
            (Self::Creating, Step::Prepared) => Some(Self::Created),
            (Self::Created, Step::Started) => Some(Self::Running),
            (Self::Running, Step::Paused) => Some(Self::Paused),
            (Self::Paused, Step::Resumed) => Some(Self::Running),
            (Self::Created | Self::Running | Self::Paused, Step::Exited(exit)) => Some(Self::Stopped(exit)),
            (Self::Creating | Self::Created | Self::Stopped(_), Step::Removed) => Some(Self::Gone),
            _ => None,
        }
    }

    /// For error texts.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Creating => "being created",
            Self::Created => "created",
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Stopped(_) => "stopped",
            Self::Gone => "removed",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exactly_the_drawn_steps_are_legal() {
        let exit = Exit::now(0);
        let states =
            [State::Creating, State::Created, State::Running, State::Paused, State::Stopped(exit), State::Gone];
        let steps = [Step::Prepared, Step::Started, Step::Paused, Step::Resumed, Step::Exited(exit), Step::Removed];
        let legal = [
            (State::Creating, Step::Prepared, State::Created),
            (State::Creating, Step::Removed, State::Gone),
            (State::Created, Step::Started, State::Running),
            (State::Created, Step::Exited(exit), State::Stopped(exit)),
            (State::Created, Step::Removed, State::Gone),
            (State::Running, Step::Exited(exit), State::Stopped(exit)),
            (State::Running, Step::Paused, State::Paused),
            (State::Paused, Step::Resumed, State::Running),
            (State::Paused, Step::Exited(exit), State::Stopped(exit)),
            (State::Stopped(exit), Step::Removed, State::Gone),
        ];
        for state in states {
            for step in steps {
                let drawn = legal.iter().find(|(from, by, _)| (*from, *by) == (state, step)).map(|(_, _, to)| *to);
                assert_eq!(state.after(step), drawn, "{state:?} after {step:?}");
            }
        }
    }
}
