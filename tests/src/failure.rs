//! How a story ends when it does not pass.

use std::io;

/// Why a story did not pass.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// It cannot run here; counted and shown, never taken for a pass.
    #[error("skipped: {0}")]
    Skip(String),
    /// What a user would have noticed.
    #[error("{0}")]
    Broken(String),
}

/// The result of a story or of one of its steps.
pub type Result<T = ()> = std::result::Result<T, Failure>;

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Broken(error.to_string())
    }
}

impl From<serde_json::Error> for Failure {
    fn from(error: serde_json::Error) -> Self {
        Self::Broken(format!("JSON: {error}"))
    }
}

/// Adds what was being done to an error.
pub trait Context<T> {
    /// Puts `what` in front of the error's own text.
    ///
    /// # Errors
    ///
    /// The error of `self`, with its context.
    fn context(self, what: &str) -> Result<T>;
}

impl<T, E: std::fmt::Display> Context<T> for std::result::Result<T, E> {
    fn context(self, what: &str) -> Result<T> {
        self.map_err(|error| Failure::Broken(format!("{what}: {error}")))
    }
}

/// Ends the story as broken unless the condition holds.
#[macro_export]
macro_rules! ensure {
    ($condition:expr, $($message:tt)+) => {
        if $condition {
        } else {
            return Err($crate::failure::Failure::Broken(format!($($message)+)));
        }
    };
}
