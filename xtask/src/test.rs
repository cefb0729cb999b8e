//! `cargo xtask test`: everything there is to test, and one line at the end.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::ops::AddAssign;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};

use clap::ValueEnum;
use serde::Deserialize;

use crate::api_test;
use crate::error::{Error, Result};
use crate::lab::{self, Session};
use crate::{process, programs, setup};

/// What to test.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Suite {
    /// Tests beside the code: no virtual machine but tiny ones
    Unit,
    /// The image formats, judged by QEMU's tools
    Block,
    /// The HTTP API against its OpenAPI document, by schemathesis
    Api,
    /// Whole guests under real KVM, in the lab where the processor has none
    Lab,
    /// Unit, API and lab (block's tests are among the first)
    All,
    /// All, with the lab's stories three times, those that take long among them, and what the block tests leave to chance
    /// tried many times more often
    Long,
    /// The block engine's threads under ThreadSanitizer; needs a nightly compiler with the component rust-src
    Tsan,
}

mod tsan;

/// How many tests ended how.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
struct Counts {
    passed: u64,
    failed: u64,
    skipped: u64,
}

impl AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

/// Runs a suite; the last line printed is the summary.
pub(crate) fn run(suite: Suite, built: Option<&Path>, filter: &[String]) -> Result<ExitCode> {
    let mut counts = Counts::default();
    match suite {
        Suite::Unit => counts += cargo_tests(&["--workspace"], &[], filter)?,
        Suite::Block => {
            let packages = ["-p", "drover-block", "--features", "import"];
            counts += cargo_tests(&packages, &[], filter)?;
        }
        Suite::Tsan => counts += tsan::run(filter)?,
        Suite::Api => counts += api(&Session::open(built)?)?,
        Suite::Lab => counts += stories(&Session::open(built)?, 1, filter)?,
        Suite::All | Suite::Long => {
            let more: &[_] = if suite == Suite::Long { &MORE } else { &[] };
            counts += cargo_tests(&["--workspace"], more, filter)?;
            let session = Session::open(built)?;
            counts += api(&session)?;
            counts += stories(&session, if suite == Suite::Long { 3 } else { 1 }, filter)?;
        }
    }
    println!(
        "{} passed, {} failed, {} skipped",
        counts.passed, counts.failed, counts.skipped
    );
    Ok(if counts.failed == 0 && counts.passed > 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Settings of block's tests for a long run: cuts of power, every back end at every failing call, seconds of hostile images,
/// random operations, schedules of each model of threads.
const MORE: [(&str, &str); 5] = [
    ("BLOCK_POWER_CUTS", "1000000"),
    ("BLOCK_EVERY_FAILURE", "1"),
    ("BLOCK_HOSTILE_SECONDS", "300"),
    ("BLOCK_OPERATIONS", "1000000"),
    ("BLOCK_SCHEDULES", "100000"),
];

/// Options for cargo that have what block's tests do millions of times optimised, without which they take three times as long.
const OPTIMISED: [&str; 8] = [
    "--config",
    "profile.dev.package.drover-block.opt-level=1",
    "--config",
    "profile.dev.package.miniz_oxide.opt-level=2",
    "--config",
    "profile.dev.package.zlib-rs.opt-level=2",
    "--config",
    "profile.dev.package.ruzstd.opt-level=2",
];

/// Runs cargo's tests with QEMU's tools in `PATH`, under nextest where it is installed.
fn cargo_tests(packages: &[&str], settings: &[(&str, &str)], filter: &[String]) -> Result<Counts> {
    let tools = setup::run()?.tools;
    let nextest = process::on_path("cargo-nextest");
    let mut command = programs::cargo();
    if nextest {
        command.args([
            "nextest",
            "run",
            "--no-fail-fast",
            "--no-tests=pass",
            // What a passing test prints is where it says that it was skipped.
            "--success-output=immediate",
        ]);
    } else {
        command.args(["test", "--no-fail-fast", "--quiet"]);
    }
    command.args(OPTIMISED).args(packages);
    if nextest {
        command.args(filter);
    } else {
        command.args(["--", "--show-output"]).args(filter);
    }
    command
        .env("PATH", lab::path_with(&tools))
        .envs(settings.iter().copied())
        .stdin(Stdio::null());
    let counts = if nextest {
        nextest_counts(&mut command)?
    } else {
        libtest_counts(&mut command)?
    };
    eprintln!(
        "cargo's tests: {} passed, {} failed, {} skipped so far",
        counts.passed, counts.failed, counts.skipped
    );
    Ok(counts)
}

/// nextest reports on standard error; its summary is the last line that begins with `Summary`.
fn nextest_counts(command: &mut Command) -> Result<Counts> {
    let (lines, success) = tee(command.stderr(Stdio::piped()), Stream::Errors)?;
    lines
        .iter()
        .rev()
        .find_map(|line| parse_nextest(line))
        .map_or_else(
            || Ok(no_summary(success)),
            |counts| Ok(consistent(told_apart(counts, &lines), success)),
        )
}

/// libtest prints one summary a binary.
fn libtest_counts(command: &mut Command) -> Result<Counts> {
    let (lines, success) = tee(command.stdout(Stdio::piped()), Stream::Output)?;
    let mut sum = Counts::default();
    let mut found = false;
    for counts in lines.iter().filter_map(|line| parse_libtest(line)) {
        sum += counts;
        found = true;
    }
    Ok(if found {
        consistent(told_apart(sum, &lines), success)
    } else {
        no_summary(success)
    })
}

/// A test that finds its host without what it needs says so in a line `skipped: …` and returns: that is no pass.
fn told_apart(mut counts: Counts, lines: &[String]) -> Counts {
    let said = lines
        .iter()
        .filter(|line| line.trim_start().starts_with("skipped: "))
        .count();
    let skipped = u64::try_from(said).unwrap_or(u64::MAX).min(counts.passed);
    counts.passed -= skipped;
    counts.skipped += skipped;
    counts
}

/// A run that failed before any test (it did not build, say) is one failure.
fn no_summary(success: bool) -> Counts {
    Counts {
        failed: u64::from(!success),
        ..Counts::default()
    }
}

/// A run that ended badly although no test was counted as failed is one failure.
fn consistent(mut counts: Counts, success: bool) -> Counts {
    if !success && counts.failed == 0 {
        counts.failed = 1;
    }
    counts
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stream {
    Output,
    Errors,
}

/// Runs a command, repeats one of its streams here, and returns that stream's lines.
fn tee(command: &mut Command, stream: Stream) -> Result<(Vec<String>, bool)> {
    let spawn = |source| Error::Spawn {
        program: "cargo".into(),
        source,
    };
    let mut child = command.spawn().map_err(spawn)?;
    let reader: Option<Box<dyn std::io::Read>> = match stream {
        Stream::Output => child.stdout.take().map(|stream| Box::new(stream) as _),
        Stream::Errors => child.stderr.take().map(|stream| Box::new(stream) as _),
    };
    let mut lines = Vec::new();
    if let Some(reader) = reader {
        for line in BufReader::new(reader)
            .split(b'\n')
            .map_while(std::result::Result::ok)
        {
            let line = String::from_utf8_lossy(&line).into_owned();
            eprintln!("{line}");
            lines.push(line);
        }
    }
    let status = child.wait().map_err(spawn)?;
    Ok((lines, status.success()))
}

/// `test result: ok. 3 passed; 0 failed; 1 ignored; …`
fn parse_libtest(line: &str) -> Option<Counts> {
    let rest = line.trim().strip_prefix("test result: ")?;
    Some(Counts {
        passed: number_before(rest, " passed")?,
        failed: number_before(rest, " failed")?,
        skipped: number_before(rest, " ignored")?,
    })
}

/// `Summary [ 0.1s] 12 tests run: 11 passed (1 slow), 1 failed, 2 skipped`
fn parse_nextest(line: &str) -> Option<Counts> {
    let line = line.trim();
    let (_, rest) = line.strip_prefix("Summary [")?.split_once("] ")?;
    Some(Counts {
        passed: number_before(rest, " passed").unwrap_or(0),
        failed: number_before(rest, " failed").unwrap_or(0)
            + number_before(rest, " timed out").unwrap_or(0),
        skipped: number_before(rest, " skipped").unwrap_or(0),
    })
}

fn number_before(text: &str, word: &str) -> Option<u64> {
    let head = &text[..text.find(word)?];
    head.rsplit(|c: char| !c.is_ascii_digit())
        .next()?
        .parse()
        .ok()
}

/// The API's checks, one test.
fn api(session: &Session) -> Result<Counts> {
    let passed = api_test::run(&session.program("drover-vmm"), &session.folder)?;
    println!(
        "{} the API keeps to its OpenAPI document",
        if passed { "passed" } else { "FAILED" }
    );
    Ok(Counts {
        passed: u64::from(passed),
        failed: u64::from(!passed),
        skipped: 0,
    })
}

/// Runs the stories, `rounds` times.
fn stories(session: &Session, rounds: u32, filter: &[String]) -> Result<Counts> {
    let mut sum = Counts::default();
    for round in 1..=rounds {
        let report = session.folder.join(format!("report-{round}.json"));
        let mut command = session.command(&["test"]);
        if rounds > 1 {
            command.arg("--long");
        }
        let status = command
            .arg("--report")
            .arg(&report)
            .args(filter)
            .stdin(Stdio::null())
            .status()
            .map_err(|source| Error::Spawn {
                program: "drover-lab".into(),
                source,
            })?;
        let text = fs::read(&report).map_err(Error::io("read the stories' report", &report))?;
        let counts: Counts = serde_json::from_slice(&text)
            .map_err(|error| Error::Other(format!("{}: {error}", report.display())))?;
        sum += consistent(counts, status.success());
    }
    eprintln!("consoles and logs: {}", session.folder.display());
    Ok(sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summaries_of_both_test_runners_are_understood() {
        assert_eq!(
            parse_libtest(
                "test result: FAILED. 3 passed; 2 failed; 1 ignored; 0 measured; 0 filtered out"
            ),
            Some(Counts {
                passed: 3,
                failed: 2,
                skipped: 1
            })
        );
        assert_eq!(
            parse_nextest(
                "     Summary [   0.412s] 12 tests run: 11 passed (1 slow), 1 failed, 2 skipped"
            ),
            Some(Counts {
                passed: 11,
                failed: 1,
                skipped: 2
            })
        );
        assert_eq!(
            parse_nextest("    Starting 12 tests across 3 binaries"),
            None
        );
    }

    #[test]
    fn a_test_that_says_it_was_skipped_is_not_counted_as_passed() {
        let lines = [
            "        PASS [ 0.1s] a",
            "    skipped: no usable /dev/kvm",
            "ok",
        ];
        let counts = Counts {
            passed: 2,
            ..Counts::default()
        };
        assert_eq!(
            told_apart(counts, &lines.map(str::to_owned)),
            Counts {
                passed: 1,
                failed: 0,
                skipped: 1
            }
        );
    }

    #[test]
    fn a_run_that_ends_badly_is_never_counted_as_clean() {
        assert_eq!(no_summary(false).failed, 1);
        assert_eq!(
            consistent(
                Counts {
                    passed: 5,
                    failed: 0,
                    skipped: 0
                },
                false
            )
            .failed,
            1
        );
    }
}
