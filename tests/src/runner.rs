//! Runs stories where the guests run: each in a process of its own, with a time bound, one after another.
//!
//! After each story the runner looks for what it left: processes of its group (ended), network
//! interfaces and files. A story that passes and leaves something has failed.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::failure::Failure;
use crate::site::Site;
use crate::stories::{self, Story};

/// How one story ended; one line of JSON in the results file.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Record {
    /// `group::name`.
    pub story: String,
    /// How it ended.
    pub outcome: Outcome,
    /// How long it took.
    pub seconds: f64,
    /// Why it did not pass.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
}

/// The ways in which a story ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// It is being run: the last line of a host that was lost.
    Started,
    /// As promised.
    Passed,
    /// Not as promised.
    Failed,
    /// Could not run here.
    Skipped,
}

/// Exit statuses of a story's process.
const PASSED: i32 = 0;
const FAILED: i32 = 1;
const SKIPPED: i32 = 77;

/// What to run and where to write.
pub struct Plan {
    /// Which stories.
    pub stories: Vec<&'static Story>,
    /// Where.
    pub site: Site,
    /// Results, one JSON object a line, appended and flushed.
    pub results: PathBuf,
    /// A folder for what each story printed.
    pub logs: PathBuf,
}

/// Runs a plan; every story is recorded.
///
/// # Errors
///
/// The results cannot be written or a story's process cannot be started.
pub fn run(plan: &Plan) -> io::Result<()> {
    fs::create_dir_all(&plan.logs)?;
    let mut results = File::options()
        .create(true)
        .append(true)
        .open(&plan.results)?;
    for story in &plan.stories {
        let mut record = Record {
            story: story.full_name(),
            outcome: Outcome::Started,
            seconds: 0.0,
            message: String::new(),
        };
        write_line(&mut results, &record)?;
        let started = Instant::now();
        (record.outcome, record.message) = run_story(story, plan)?;
        record.seconds = started.elapsed().as_secs_f64();
        write_line(&mut results, &record)?;
        let word = match record.outcome {
            Outcome::Passed => "ok",
            Outcome::Skipped => "skipped",
            Outcome::Started | Outcome::Failed => "FAILED",
        };
        println!(
            "story {} ... {word} ({:.1} s) {}",
            record.story, record.seconds, record.message
        );
    }
    Ok(())
}

fn write_line(results: &mut File, record: &Record) -> io::Result<()> {
    let mut line = serde_json::to_vec(record)?;
    line.push(b'\n');
    results.write_all(&line)?;
    results.sync_data()
}

fn run_story(story: &Story, plan: &Plan) -> io::Result<(Outcome, String)> {
    let log_path = plan
        .logs
        .join(format!("{}.log", story.full_name().replace("::", "-")));
    let log = File::create(&log_path)?;
    let before = interfaces();
    let folder = plan.site.scratch.join(story.name);
    fs::create_dir_all(&folder)?;
    let site = serde_json::to_string(&plan.site)?;
    let mut child = Command::new(std::env::current_exe()?)
        .args(["story", "--site", &site, "--folder"])
        .arg(&folder)
        .arg(story.full_name())
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .process_group(0)
        .spawn()?;
    let group = rustix::process::Pid::from_child(&child);
    let deadline = Instant::now() + story.timeout;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break Some(status);
        }
        if Instant::now() >= deadline {
            break None;
        }
        thread::sleep(Duration::from_millis(20));
    };
    // The group holds the story and all it started; a story that cleaned up has left it empty.
    let in_group = rustix::process::kill_process_group(group, rustix::process::Signal::KILL)
        .is_ok()
        && status.is_some();
    child.wait()?;
    let left_processes = in_group | end_strays(&folder);
    let mut outcome = match status.and_then(|status| status.code()) {
        Some(PASSED) => Outcome::Passed,
        Some(SKIPPED) => Outcome::Skipped,
        _ => Outcome::Failed,
    };
    let mut message = match status {
        None => format!("still running after {} s", story.timeout.as_secs()),
        Some(_) if outcome == Outcome::Passed => String::new(),
        Some(_) => last_message(&log_path),
    };
    let left_interfaces: Vec<String> = interfaces().difference(&before).cloned().collect();
    for interface in &left_interfaces {
        let _ = Command::new("ip")
            .args(["link", "delete", interface])
            .status();
    }
    fs::remove_dir_all(&folder)?;
    if outcome == Outcome::Passed && (left_processes || !left_interfaces.is_empty()) {
        outcome = Outcome::Failed;
        message =
            format!("it left behind: processes {left_processes}, interfaces {left_interfaces:?}");
    }
    Ok((outcome, message))
}

/// Ends processes outside the story's group (a worker's VMM is detached) whose command line names the story's folder.
fn end_strays(folder: &Path) -> bool {
    let wanted = folder.as_os_str().as_encoded_bytes();
    let mut found = false;
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(id) = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok())
        else {
            continue;
        };
        let command_line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let names_it = command_line
            .windows(wanted.len())
            .any(|window| window == wanted);
        if let Some(id) = rustix::process::Pid::from_raw(id).filter(|_| names_it) {
            found |= rustix::process::kill_process(id, rustix::process::Signal::KILL).is_ok();
        }
    }
    found
}

/// The line in which a story said why it did not pass.
fn last_message(log: &Path) -> String {
    let text = fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let line = text
        .lines()
        .rev()
        .find_map(|line| line.strip_prefix(MESSAGE));
    line.unwrap_or("it ended without a word: see its log")
        .to_owned()
}

const MESSAGE: &str = "story: ";

fn interfaces() -> BTreeSet<String> {
    let entries = fs::read_dir("/sys/class/net")
        .into_iter()
        .flatten()
        .flatten();
    entries
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect()
}

/// Runs one story in this process and returns the exit status that tells its outcome.
#[must_use]
pub fn run_here(name: &str, site: &Site, folder: &Path) -> i32 {
    let Some(story) = stories::all().find(|story| story.full_name() == name) else {
        println!("{MESSAGE}there is no story {name}");
        return FAILED;
    };
    let scene = stories::Scene {
        site: site.clone(),
        folder: folder.to_owned(),
    };
    match (story.run)(&scene) {
        Ok(()) => PASSED,
        Err(Failure::Skip(reason)) => {
            println!("{MESSAGE}{}", one_line(&reason));
            SKIPPED
        }
        Err(Failure::Broken(reason)) => {
            println!("{reason}\n{MESSAGE}{}", one_line(&reason));
            FAILED
        }
    }
}

fn one_line(text: &str) -> String {
    let line: String = text.split_whitespace().collect::<Vec<_>>().join(" ");
    line.chars().take(600).collect()
}
