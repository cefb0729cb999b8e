//! `drover doctor`: is this host ready? One line a matter, each with what to do.

mod checks;

use std::process::ExitCode;

use drover_worker::StateDir;
use serde::Serialize;

use crate::args::OutputMode;
use crate::failure::Failure;
use crate::output;

/// How a matter stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Verdict {
    /// As it should be.
    Ok,
    /// Something is slower or missing that not every worker needs.
    Warn,
    /// No worker can run.
    Fail,
}

/// What was found about one matter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Finding {
    pub(crate) check: &'static str,
    pub(crate) verdict: Verdict,
    pub(crate) found: String,
    /// What to do about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) remedy: Option<String>,
}

impl Finding {
    pub(crate) fn ok(check: &'static str, found: impl Into<String>) -> Self {
        Self {
            check,
            verdict: Verdict::Ok,
            found: found.into(),
            remedy: None,
        }
    }

    pub(crate) fn warn(
        check: &'static str,
        found: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self {
            check,
            verdict: Verdict::Warn,
            found: found.into(),
            remedy: Some(remedy.into()),
        }
    }

    pub(crate) fn fail(
        check: &'static str,
        found: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self {
            verdict: Verdict::Fail,
            ..Self::warn(check, found, remedy)
        }
    }
}

/// Looks at everything and says how it stands; exit code 1 if no worker can run.
pub(crate) fn run(state: &StateDir, mode: OutputMode) -> Result<ExitCode, Failure> {
    let findings = checks::all(state);
    output::print(mode, &findings, |findings| {
        let rows: Vec<Vec<String>> = findings
            .iter()
            .map(|finding| {
                let verdict = match finding.verdict {
                    Verdict::Ok => "ok",
                    Verdict::Warn => "warn",
                    Verdict::Fail => "FAIL",
                };
                let remedy = finding
                    .remedy
                    .as_ref()
                    .map(|remedy| format!("; {remedy}"))
                    .unwrap_or_default();
                vec![
                    verdict.to_owned(),
                    finding.check.to_owned(),
                    format!("{}{remedy}", finding.found),
                ]
            })
            .collect();
        output::table(&["", "CHECK", "FOUND"], &rows)
    })?;
    let failed = findings
        .iter()
        .any(|finding| finding.verdict == Verdict::Fail);
    Ok(if failed {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    })
}
