//! What can go wrong in a task, told to the person at the terminal.

use std::io;
use std::path::{Path, PathBuf};

/// A task that did not succeed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// A file operation failed.
    #[error("{action} {path}: {source}")]
    Io {
        /// What was tried, as a verb.
        action: &'static str,
        /// On which file.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
    /// A program could not be started.
    #[error("cannot start `{program}`: {source}")]
    Spawn {
        /// The program.
        program: String,
        /// Why it did not start.
        source: io::Error,
    },
    /// A program ended with a failure.
    #[error("`{program}` failed ({status}){detail}")]
    Command {
        /// The program and its first arguments.
        program: String,
        /// How it ended.
        status: String,
        /// Its last words, or where they are kept.
        detail: String,
    },
    /// Something is not as it must be.
    #[error("{0}")]
    Other(String),
}

impl Error {
    /// Makes a closure that names what was tried on which file.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io {
            action,
            path,
            source,
        }
    }
}

/// The result of a task.
pub(crate) type Result<T> = std::result::Result<T, Error>;
