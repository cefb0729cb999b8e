//! `drover-lab`: the lab's program, on this machine and in the emulated hosts. `cargo xtask` calls it.

#![forbid(unsafe_code)]

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use drover_tests::host::shards::{self, Report, Run};
use drover_tests::host::{Ended, Host};
use drover_tests::runner::{self, Outcome, Plan};
use drover_tests::site::{Lab, Site};
use drover_tests::stories::{self, Story};

/// Runs stories and jobs, in emulated KVM hosts where the processor has no virtualization of its own.
#[derive(Parser)]
#[command(name = "drover-lab", disable_help_subcommand = true)]
enum Arguments {
    /// List the stories
    List,
    /// Run the stories whose names contain FILTER
    Test {
        #[command(flatten)]
        place: Place,
        /// Emulated hosts side by side
        #[arg(long, default_value_t = 2)]
        shards: usize,
        /// Where to write how many passed, failed and were skipped
        #[arg(long)]
        report: PathBuf,
        /// Parts of story names; none means all
        filter: Vec<String>,
    },
    /// Run a shell command in an emulated host, with the programs under test in its PATH
    Exec {
        #[command(flatten)]
        place: Place,
        /// Memory of the host
        #[arg(long, default_value_t = 4096)]
        memory_mib: u32,
        /// Longest time for all of it
        #[arg(long, default_value_t = 600)]
        timeout_s: u64,
        /// Files to copy to the host beside the programs
        #[arg(long)]
        with: Vec<PathBuf>,
        /// The command
        #[arg(required = true)]
        command: Vec<String>,
    },
    /// Run stories here, one after another
    #[command(hide = true)]
    Run {
        #[arg(long, value_parser = parse_site)]
        site: Site,
        #[arg(long)]
        results: PathBuf,
        #[arg(long)]
        logs: PathBuf,
        names: Vec<String>,
    },
    /// Run one story in this process
    #[command(hide = true)]
    Story {
        #[arg(long, value_parser = parse_site)]
        site: Site,
        #[arg(long)]
        folder: PathBuf,
        name: String,
    },
}

/// Where things are on this machine.
#[derive(clap::Args)]
struct Place {
    /// The description that `cargo xtask setup` wrote
    #[arg(long)]
    lab: PathBuf,
    /// The folder for this run; it is kept
    #[arg(long)]
    folder: PathBuf,
    /// The folder of the programs under test
    #[arg(long)]
    programs: PathBuf,
}

impl Place {
    fn lab(&self) -> io::Result<Lab> {
        Ok(serde_json::from_slice(&fs::read(&self.lab)?)?)
    }

    /// The programs that are there, of those that stories use.
    fn programs(&self) -> Vec<PathBuf> {
        ["drover-vmm", "drover", "drover-lab", "lab-guest"]
            .iter()
            .map(|name| self.programs.join(name))
            .filter(|path| path.is_file())
            .collect()
    }
}

fn parse_site(text: &str) -> Result<Site, String> {
    serde_json::from_str(text).map_err(|error| error.to_string())
}

fn selected(filter: &[String]) -> Vec<&'static Story> {
    stories::all()
        .filter(|story| {
            let name = story.full_name();
            filter.is_empty() || filter.iter().any(|part| name.contains(part.as_str()))
        })
        .collect()
}

/// Runs stories on this machine's own KVM.
fn test_here(place: &Place, lab: &Lab, stories: Vec<&'static Story>) -> io::Result<Report> {
    let scratch = place.folder.join("scratch");
    fs::create_dir_all(&scratch)?;
    let results = place.folder.join("results.jsonl");
    let site = Site {
        images: lab.images.clone(),
        scratch,
        programs: place.programs.clone(),
    };
    runner::run(&Plan {
        stories,
        site,
        results: results.clone(),
        logs: place.folder.join("logs"),
    })?;
    Ok(Report {
        records: shards::finished(&results)?,
        lost_hosts: 0,
    })
}

fn test(
    place: &Place,
    shards: usize,
    report_path: &Path,
    filter: &[String],
) -> io::Result<ExitCode> {
    let lab = place.lab()?;
    let stories = selected(filter);
    if stories.is_empty() {
        return Err(io::Error::other(
            "no story has such a name: see drover-lab list",
        ));
    }
    let report = if drover_tests::site::has_hardware_virtualization()? {
        test_here(place, &lab, stories)?
    } else {
        Run {
            lab: &lab,
            folder: place.folder.clone(),
            programs: place.programs(),
            stories,
            shards,
        }
        .run()?
    };
    let count = |outcome| {
        report
            .records
            .iter()
            .filter(|record| record.outcome == outcome)
            .count()
    };
    let (passed, skipped) = (count(Outcome::Passed), count(Outcome::Skipped));
    let failed = report.records.len() - passed - skipped;
    if report.lost_hosts > 0 {
        println!(
            "{} emulated hosts were lost and replaced",
            report.lost_hosts
        );
    }
    let summary = serde_json::json!({
        "passed": passed,
        "failed": failed,
        "skipped": skipped,
        "lost_hosts": report.lost_hosts,
        "stories": report.records,
    });
    fs::write(report_path, serde_json::to_vec_pretty(&summary)?)?;
    Ok(if failed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn exec(place: &Place, host: &HostOptions<'_>, command: &[String]) -> io::Result<ExitCode> {
    let lab = place.lab()?;
    let mut programs = place.programs();
    programs.extend_from_slice(host.with);
    let host = Host {
        lab: &lab,
        folder: place.folder.clone(),
        programs,
        job: command.join(" "),
        memory_mib: host.memory_mib,
        timeout: Duration::from_secs(host.timeout_s),
        echo: true,
    };
    match host.run()? {
        Ended::Job(0) => Ok(ExitCode::SUCCESS),
        Ended::Job(status) => Err(io::Error::other(format!("the command ended with {status}"))),
        Ended::TimedOut => Err(io::Error::other("the command did not end in time")),
        Ended::Lost(how) => Err(io::Error::other(format!("lab failure: {how}"))),
    }
}

struct HostOptions<'a> {
    memory_mib: u32,
    timeout_s: u64,
    with: &'a [PathBuf],
}

fn run_stories(
    site: Site,
    results: PathBuf,
    logs: PathBuf,
    names: &[String],
) -> io::Result<ExitCode> {
    let stories = names
        .iter()
        .map(|name| {
            stories::all()
                .find(|story| story.full_name() == *name)
                .ok_or_else(|| io::Error::other(format!("there is no story {name}")))
        })
        .collect::<io::Result<Vec<_>>>()?;
    runner::run(&Plan {
        stories,
        site,
        results,
        logs,
    })?;
    Ok(ExitCode::SUCCESS)
}

fn story(name: &str, site: &Site, folder: &Path) -> ExitCode {
    match runner::run_here(name, site, folder) {
        0 => ExitCode::SUCCESS,
        77 => ExitCode::from(77),
        _ => ExitCode::FAILURE,
    }
}

fn run(arguments: Arguments) -> io::Result<ExitCode> {
    match arguments {
        Arguments::List => {
            for story in stories::all() {
                println!("{}", story.full_name());
            }
            Ok(ExitCode::SUCCESS)
        }
        Arguments::Test {
            place,
            shards,
            report,
            filter,
        } => test(&place, shards, &report, &filter),
        Arguments::Exec {
            place,
            memory_mib,
            timeout_s,
            with,
            command,
        } => exec(
            &place,
            &HostOptions {
                memory_mib,
                timeout_s,
                with: &with,
            },
            &command,
        ),
        Arguments::Run {
            site,
            results,
            logs,
            names,
        } => run_stories(site, results, logs, &names),
        Arguments::Story { site, folder, name } => Ok(story(&name, &site, &folder)),
    }
}

fn main() -> ExitCode {
    match run(Arguments::parse()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("drover-lab: {error}");
            ExitCode::FAILURE
        }
    }
}
