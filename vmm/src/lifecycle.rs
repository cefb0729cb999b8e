//! The VM's life as one table: which input is possible in which state, what is to be done, and which state follows.
//!
//! | state ╲ input | create | delete | start | shutdown | reset (API) | reset (guest) | off (guest) | deadline | crash |
//! |---|---|---|---|---|---|---|---|---|---|
//! | no VM         | build → created | – | no VM | no VM | no VM | – | – | – | – |
//! | created       | 409 | remove → no VM | run → running | 409 | 409 | – | – | – | finish → stopped |
//! | running       | 409 | 409 | – | press button → shutting-down | reset | reset | finish → stopped | – | finish → stopped |
//! | paused        | 409 | 409 | 409 | resume, press button → shutting-down | reset → running | reset, parked | finish → stopped | – | finish → stopped |
//! | shutting-down | 409 | 409 | 409 | press button | 409 | reset | finish → stopped | finish → stopped | finish → stopped |
//! | stopped       | 409 | remove → no VM | 409 | – | 409 | – | – | – | – |
//!
//! | state ╲ input | pause | resume | a disk stopped |
//! |---|---|---|---|
//! | no VM         | no VM | no VM | – |
//! | created       | 409 | 409 | – |
//! | running       | pause → paused | – | pause → paused |
//! | paused        | – | resume → running | – |
//! | shutting-down | 409 | 409 | report to the guest |
//! | stopped       | 409 | 409 | – |
//!
//! "–" is a success that changes nothing: calls are idempotent, and what the guest or a timer says too late is ignored. A second
//! `create` of the very same definition succeeds too; the caller compares before it asks this table.

use drover_api::types::{ApiError, StopReason, VmState};

/// What can happen to a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Input {
    /// `PUT /v1/vm` with a definition that is not the present one.
    Create,
    /// `DELETE /v1/vm`.
    Delete,
    /// `POST /v1/vm/start`.
    Start,
    /// `POST /v1/vm/shutdown`.
    Shutdown,
    /// `POST /v1/vm/reset`.
    Reset,
    /// The guest reset the machine: port 0xcf9, keyboard controller, triple fault.
    GuestReset,
    /// The guest turned the machine off.
    GuestOff,
    /// The deadline of a shutdown passed.
    Deadline,
    /// The machine cannot go on.
    Crash,
    /// `POST /v1/vm/pause`.
    Pause,
    /// `POST /v1/vm/resume`.
    Resume,
    /// A request of a disk failed and is kept, or a disk could not be opened again.
    DiskStopped,
}

impl Input {
    #[cfg(test)]
    const ALL: [Self; 12] = [
        Self::Create,
        Self::Delete,
        Self::Start,
        Self::Shutdown,
        Self::Reset,
        Self::GuestReset,
        Self::GuestOff,
        Self::Deadline,
        Self::Crash,
        Self::Pause,
        Self::Resume,
        Self::DiskStopped,
    ];

    fn verb(self) -> &'static str {
        match self {
            Self::Create => "be created again with another definition",
            Self::Delete => "be deleted",
            Self::Start => "be started",
            Self::Shutdown => "be shut down",
            Self::Reset | Self::GuestReset => "be reset",
            Self::GuestOff | Self::Deadline => "be turned off",
            Self::Crash => "crash",
            Self::Pause | Self::DiskStopped => "be paused",
            Self::Resume => "be resumed",
        }
    }
}

/// What is to be done before the next state is entered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Nothing.
    Nothing,
    /// Open and build everything.
    Build,
    /// Give everything back.
    Remove,
    /// Let the processors run.
    Run,
    /// Stop the processors for a while.
    Pause,
    /// Let the processors run on.
    Resume,
    /// Press the power button and (re)start the deadline.
    PressPowerButton,
    /// Let the processors run on, then press the power button and start the deadline.
    ResumeAndPressPowerButton,
    /// Reset in place.
    Reset,
    /// Reset in place; the processors wait.
    ResetParked,
    /// Tell the guest of what failed: a VM that is to end does not wait for a repair.
    ReportFailures,
    /// Stop the processors for good.
    Finish(StopReason),
}

/// One row and column of the table: what to do, and what follows if it succeeds (`None`: no VM).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// To be done first.
    pub action: Action,
    /// The state then.
    pub next: Option<VmState>,
}

/// Looks up what `input` means in `state` (`None`: no VM).
///
/// # Errors
/// The state does not allow it, or there is no VM.
pub fn step(state: Option<VmState>, input: Input) -> Result<Step, ApiError> {
    use Action::{
        Build, Finish, Nothing, Pause, PressPowerButton, Remove, ReportFailures, Reset,
        ResetParked, Resume, ResumeAndPressPowerButton, Run,
    };
    use VmState::{Created, Paused, Running, ShuttingDown, Stopped};

    let to = |action, next| {
        Ok(Step {
            action,
            next: Some(next),
        })
    };
    let stay = Ok(Step {
        action: Nothing,
        next: state,
    });
    let Some(now) = state else {
        return match input {
            Input::Create => to(Build, Created),
            Input::Start | Input::Shutdown | Input::Reset | Input::Pause | Input::Resume => {
                Err(ApiError::no_vm())
            }
            Input::Delete
            | Input::GuestReset
            | Input::GuestOff
            | Input::Deadline
            | Input::Crash
            | Input::DiskStopped => stay,
        };
    };
    let forbidden = || Err(ApiError::wrong_state(now, input.verb()));
    match (now, input) {
        (_, Input::Create) => forbidden(),

        (Created | Stopped, Input::Delete) => Ok(Step {
            action: Remove,
            next: None,
        }),
        (Running | Paused | ShuttingDown, Input::Delete) => forbidden(),

        (Created, Input::Start) => to(Run, Running),
        (Running, Input::Start) => stay,
        (Paused | ShuttingDown | Stopped, Input::Start) => forbidden(),

        (Created, Input::Shutdown) => forbidden(),
        (Running | ShuttingDown, Input::Shutdown) => to(PressPowerButton, ShuttingDown),
        (Paused, Input::Shutdown) => to(ResumeAndPressPowerButton, ShuttingDown),
        (Stopped, Input::Shutdown) => stay,

        (Running | Paused, Input::Reset) => to(Reset, Running),
        (Created | ShuttingDown | Stopped, Input::Reset) => forbidden(),

        (Running | ShuttingDown, Input::GuestReset) => to(Reset, now),
        (Paused, Input::GuestReset) => to(ResetParked, Paused),
        (Running | Paused | ShuttingDown, Input::GuestOff) => {
            to(Finish(StopReason::PoweredOff), Stopped)
        }
        (ShuttingDown, Input::Deadline) => to(Finish(StopReason::Forced), Stopped),
        (Created | Running | Paused | ShuttingDown, Input::Crash) => {
            to(Finish(StopReason::Crashed), Stopped)
        }
        (Created | Stopped, Input::GuestReset | Input::GuestOff)
        | (Created | Running | Paused | Stopped, Input::Deadline)
        | (Stopped, Input::Crash) => stay,

        (Running, Input::Pause | Input::DiskStopped) => to(Pause, Paused),
        (Paused, Input::Pause | Input::DiskStopped) | (Running, Input::Resume) => stay,
        (Paused, Input::Resume) => to(Resume, Running),
        (ShuttingDown, Input::DiskStopped) => to(ReportFailures, ShuttingDown),
        (Created | Stopped, Input::DiskStopped) => stay,
        (Created | ShuttingDown | Stopped, Input::Pause | Input::Resume) => forbidden(),
    }
}

#[cfg(test)]
mod tests {
    use drover_api::types::ErrorCode;

    use super::*;

    /// The table of the module comment, written the other way round: one word a cell.
    const TABLE: [(Option<VmState>, &str); 6] = [
        (None, "created - none none none - - - - none none -"),
        (
            Some(VmState::Created),
            "409 gone running 409 409 - - - stopped 409 409 -",
        ),
        (
            Some(VmState::Running),
            "409 409 - shutting-down running running stopped - stopped paused - paused",
        ),
        (
            Some(VmState::Paused),
            "409 409 409 shutting-down running paused stopped - stopped - running -",
        ),
        (
            Some(VmState::ShuttingDown),
            "409 409 409 shutting-down 409 shutting-down stopped stopped stopped 409 409 shutting-down",
        ),
        (
            Some(VmState::Stopped),
            "409 gone 409 - 409 - - - - 409 409 -",
        ),
    ];

    #[test]
    fn every_input_in_every_state_does_what_the_table_says() {
        for (state, cells) in TABLE {
            let cells: Vec<&str> = cells.split(' ').collect();
            assert_eq!(cells.len(), Input::ALL.len(), "{state:?}");
            for (input, cell) in Input::ALL.into_iter().zip(cells) {
                let outcome = match step(state, input) {
                    Err(error) if error.code == ErrorCode::NoVm => "none".to_owned(),
                    Err(error) => {
                        assert_eq!(error.state, state, "the present state is told");
                        error.status().to_string()
                    }
                    Ok(Step {
                        action: Action::Nothing,
                        next,
                    }) => {
                        assert_eq!(next, state);
                        "-".to_owned()
                    }
                    Ok(Step { next, .. }) => {
                        next.map_or("gone".to_owned(), |next| next.to_string())
                    }
                };
                assert_eq!(outcome, cell, "{state:?} {input:?}");
            }
        }
    }

    #[test]
    fn a_vm_stops_for_the_reason_that_ended_it() {
        let finish = |state, input| step(Some(state), input).unwrap().action;
        use StopReason::{Crashed, Forced, PoweredOff};
        assert_eq!(
            finish(VmState::Running, Input::GuestOff),
            Action::Finish(PoweredOff)
        );
        assert_eq!(
            finish(VmState::ShuttingDown, Input::GuestOff),
            Action::Finish(PoweredOff)
        );
        assert_eq!(
            finish(VmState::ShuttingDown, Input::Deadline),
            Action::Finish(Forced)
        );
        assert_eq!(
            finish(VmState::Running, Input::Crash),
            Action::Finish(Crashed)
        );
    }
}
