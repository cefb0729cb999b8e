//! How a command fails: one line on standard error and an exit code.
//!
//! | code | meaning |
//! |---|---|
//! | 0 | done |
//! | 1 | the host, or something on it, is at fault |
//! | 2 | the input is: an argument, a definition, something it names |

use std::fmt;
use std::process::ExitCode;

/// Why a command failed.
#[derive(Debug)]
pub(crate) struct Failure {
    message: String,
    bad_input: bool,
}

impl Failure {
    /// The input is at fault.
    pub(crate) fn input(message: impl Into<String>) -> Self {
        Self {
            message: message.into(),
            bad_input: true,
        }
    }

    /// The host is at fault.
    pub(crate) fn host(message: impl Into<String>) -> Self {
        Self {
            message: message.into(),
            bad_input: false,
        }
    }

    /// The exit code.
    pub(crate) fn code(&self) -> ExitCode {
        ExitCode::from(if self.bad_input { 2 } else { 1 })
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl From<drover_worker::Error> for Failure {
    fn from(error: drover_worker::Error) -> Self {
        Self {
            bad_input: error.is_bad_input(),
            message: error.to_string(),
        }
    }
}
