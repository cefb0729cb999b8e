//! Spreads stories over emulated hosts and gathers what became of each.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use crate::host::{Ended, Host};
use crate::runner::{Outcome, Record};
use crate::site::{Lab, Site};
use crate::stories::Story;

/// What the emulated host calls the folders of a [`Site`].
#[must_use]
pub fn site_in_host() -> Site {
    Site {
        images: "/images".into(),
        scratch: "/scratch".into(),
        programs: "/run/lab".into(),
    }
}

/// A whole run.
pub struct Run<'a> {
    /// The lab's files.
    pub lab: &'a Lab,
    /// Run folder; one folder a shard is made in it.
    pub folder: PathBuf,
    /// Programs under test, this one among them.
    pub programs: Vec<PathBuf>,
    /// Stories to run.
    pub stories: Vec<&'static Story>,
    /// Hosts side by side.
    pub shards: usize,
}

/// What a run gave.
#[derive(Debug, Default)]
pub struct Report {
    /// One record a story.
    pub records: Vec<Record>,
    /// Hosts that were lost (their stories were run again).
    pub lost_hosts: usize,
}

/// Spreads stories over shards by the time they are expected to take, longest first.
#[must_use]
pub fn spread(stories: &[&'static Story], shards: usize) -> Vec<Vec<&'static Story>> {
    let mut sorted = stories.to_vec();
    sorted.sort_by_key(|story| (std::cmp::Reverse(story.expected), story.full_name()));
    let mut spread: Vec<(Duration, Vec<&'static Story>)> = vec![Default::default(); shards.max(1)];
    for story in sorted {
        if let Some((total, shard)) = spread.iter_mut().min_by_key(|(total, _)| *total) {
            *total += story.expected;
            shard.push(story);
        }
    }
    spread
        .into_iter()
        .map(|(_, shard)| shard)
        .filter(|shard| !shard.is_empty())
        .collect()
}

impl Run<'_> {
    /// Runs all stories; a host that is lost is replaced once for the stories it had not finished.
    ///
    /// # Errors
    ///
    /// A run folder cannot be written, or QEMU cannot be started.
    pub fn run(&self) -> io::Result<Report> {
        let shards = spread(&self.stories, self.shards);
        let reports = thread::scope(|scope| {
            let handles: Vec<_> = shards
                .iter()
                .enumerate()
                .map(|(index, stories)| scope.spawn(move || self.shard(index + 1, stories)))
                .collect();
            handles
                .into_iter()
                .map(|handle| {
                    handle
                        .join()
                        .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
                })
                .collect::<io::Result<Vec<Report>>>()
        })?;
        let mut whole = Report::default();
        for report in reports {
            whole.records.extend(report.records);
            whole.lost_hosts += report.lost_hosts;
        }
        Ok(whole)
    }

    fn shard(&self, number: usize, stories: &[&'static Story]) -> io::Result<Report> {
        let mut report = Report::default();
        let mut left = stories.to_vec();
        for attempt in 1..=2 {
            let folder = self
                .folder
                .join(format!("shard-{number}-attempt-{attempt}"));
            let ended = self.host(folder.clone(), &left)?;
            let records = finished(&folder.join("share/results.jsonl"))?;
            left.retain(|story| {
                !records
                    .iter()
                    .any(|record| record.story == story.full_name())
            });
            report.records.extend(records);
            if left.is_empty() {
                return Ok(report);
            }
            report.lost_hosts += 1;
            println!(
                "lab failure: host {number} was lost ({ended:?}), {} stories to go; its console: {}",
                left.len(),
                folder.join("console.log").display()
            );
        }
        report.records.extend(left.iter().map(|story| Record {
            story: story.full_name(),
            outcome: Outcome::Failed,
            seconds: 0.0,
            message: "lab failure: two emulated hosts were lost before it ended".into(),
        }));
        Ok(report)
    }

    fn host(&self, folder: PathBuf, stories: &[&'static Story]) -> io::Result<Ended> {
        let names: Vec<String> = stories
            .iter()
            .map(|story| format!("'{}'", story.full_name()))
            .collect();
        let site = serde_json::to_string(&site_in_host())?;
        let bound: Duration = stories.iter().map(|story| story.timeout).sum();
        let memory_mib = stories
            .iter()
            .map(|story| story.memory_mib)
            .max()
            .unwrap_or(0);
        let host = Host {
            lab: self.lab,
            folder,
            programs: self.programs.clone(),
            job: format!(
                "exec ./drover-lab run --site '{site}' --results /host/results.jsonl --logs /host/logs {}",
                names.join(" ")
            ),
            memory_mib: memory_mib + HOST_MEMORY_MIB,
            timeout: Duration::from_secs(60) + bound,
            echo: "story ",
        };
        host.run()
    }
}

/// What the host itself needs beside the guests of its stories.
pub const HOST_MEMORY_MIB: u32 = 1536;

/// The stories of a results file that came to an end; a last half line of a lost host is left out.
///
/// # Errors
///
/// The file is there and cannot be read.
pub fn finished(results: &Path) -> io::Result<Vec<Record>> {
    let text = match fs::read_to_string(results) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        text => text?,
    };
    let records = text
        .lines()
        .filter_map(|line| serde_json::from_str::<Record>(line).ok());
    Ok(records
        .filter(|record| record.outcome != Outcome::Started)
        .collect())
}
