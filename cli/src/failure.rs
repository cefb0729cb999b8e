//! How a command fails: one line on standard error, a JSON object with `--output json`, and an exit code.
//!
//! | code | meaning |
//! |---|---|
//! | 0 | done |
//! | 1 | the host, or something on it, is at fault |
//! | 2 | the input is: an argument, a definition, something it names |

use std::fmt::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use serde::Serialize;

/// Why a command failed.
#[derive(Debug)]
pub(crate) struct Failure {
    message: String,
    bad_input: bool,
    file: Option<PathBuf>,
}

/// What a program is told on standard error.
#[derive(Serialize)]
struct Told<'a> {
    error: &'a str,
    /// The file or address in question.
    #[serde(skip_serializing_if = "Option::is_none")]
    file: Option<&'a Path>,
    /// Whether the input is at fault, rather than the host.
    bad_input: bool,
}

impl Failure {
    /// The input is at fault.
    pub(crate) fn input(message: impl Into<String>) -> Self {
        Self {
            message: message.into(),
            bad_input: true,
            file: None,
        }
    }

    /// The host is at fault.
    pub(crate) fn host(message: impl Into<String>) -> Self {
        Self {
            message: message.into(),
            bad_input: false,
            file: None,
        }
    }

    /// Names the file in question.
    pub(crate) fn about(mut self, file: &Path) -> Self {
        self.file = Some(file.to_owned());
        self
    }

    /// The failure as a line of JSON.
    pub(crate) fn json(&self) -> String {
        let told = Told {
            error: &self.message,
            file: self.file.as_deref().filter(|file| file.to_str().is_some()),
            bad_input: self.bad_input,
        };
        // Text, a path that is text, and a truth value.
        serde_json::to_string(&told).unwrap_or_default()
    }

    /// The exit code.
    pub(crate) fn code(&self) -> ExitCode {
        ExitCode::from(if self.bad_input { 2 } else { 1 })
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // One line, whatever the names in it: a file's name may hold line breaks, and what a terminal obeys.
        for c in self.message.chars() {
            match c.is_control() {
                true => write!(f, "{}", c.escape_default())?,
                false => f.write_char(c)?,
            }
        }
        Ok(())
    }
}

impl From<drover_worker::Error> for Failure {
    fn from(error: drover_worker::Error) -> Self {
        Self {
            bad_input: error.is_bad_input(),
            message: error.to_string(),
            file: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_one_line_whatever_the_names_in_it() {
        let failure = Failure::input("a\nb\u{1b}[2J: does not exist, é");
        assert_eq!(failure.to_string(), "a\\nb\\u{1b}[2J: does not exist, é");
    }
}
