//! `drover-lab`: the lab's program, on this machine and in the emulated hosts. `cargo xtask` calls it.

#![forbid(unsafe_code)]

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use drover_tests::bench;
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
        /// The stories that take long, too
        #[arg(long)]
        long: bool,
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
    /// Make a worker, show that it joined, and delete it
    Demo {
        #[command(flatten)]
        place: Place,
    },
    /// The demo, here
    #[command(hide = true)]
    DemoHere {
        #[arg(long, value_parser = parse_site)]
        site: Site,
    },
    /// Compare with QEMU and print the report as JSON
    Bench {
        #[command(flatten)]
        place: Place,
        /// What to measure
        #[arg(value_enum)]
        what: Benchmark,
        /// Rounds; as many as its definition asks for if absent
        #[arg(long)]
        rounds: Option<usize>,
        /// Where to write the report
        #[arg(long)]
        json: PathBuf,
        /// Fewer and shorter runs (block)
        #[arg(long)]
        quick: bool,
        /// Only the rows whose labels contain one of these (block)
        cases: Vec<String>,
    },
    /// Measure boots here
    #[command(hide = true)]
    BenchBoot {
        #[arg(long, value_parser = parse_site)]
        site: Site,
        #[arg(long)]
        rounds: usize,
        #[arg(long)]
        json: PathBuf,
    },
    /// Our side of a run of `bench block`
    #[command(hide = true)]
    BlockLoad { task: String },
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

/// The benchmarks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Benchmark {
    /// The same guest to its init under Drover, QEMU microvm and QEMU q35
    Boot,
    /// Process start to the first instruction of a tiny guest, on this machine's KVM
    Start,
    /// A worker's overlay and seed, durable, on this machine
    Provision,
    /// The image engine, on this machine's memory and disk
    Block,
}

impl Benchmark {
    fn rounds(self) -> usize {
        match self {
            Self::Boot => 9,
            Self::Start | Self::Provision => 50,
            Self::Block => 10,
        }
    }
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

    /// The programs that stories use.
    fn programs(&self) -> io::Result<Vec<PathBuf>> {
        ["drover-vmm", "drover", "drover-lab", "lab-guest"]
            .iter()
            .map(|name| {
                let path = self.programs.join(name);
                if path.is_file() {
                    return Ok(path);
                }
                Err(io::Error::other(format!("{} is not built", path.display())))
            })
            .collect()
    }
}

fn parse_site(text: &str) -> Result<Site, String> {
    serde_json::from_str(text).map_err(|error| error.to_string())
}

/// A long story is told when it is asked for by its whole name, or `long`.
fn selected(filter: &[String], long: bool) -> Vec<&'static Story> {
    stories::all()
        .filter(|story| {
            let name = story.full_name();
            let wanted =
                filter.is_empty() || filter.iter().any(|part| name.contains(part.as_str()));
            let asked_for = filter
                .iter()
                .any(|part| *part == name || part == story.name);
            wanted && (long || asked_for || !story.only_long)
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
    stories: Vec<&'static Story>,
) -> io::Result<ExitCode> {
    let lab = place.lab()?;
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
            programs: place.programs()?,
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
    let mut programs = place.programs()?;
    programs.extend_from_slice(host.with);
    let host = Host {
        lab: &lab,
        folder: place.folder.clone(),
        programs,
        job: command.join(" "),
        memory_mib: host.memory_mib,
        timeout: Duration::from_secs(host.timeout_s),
        echo: "",
    };
    match host.run()? {
        Ended::Job(0) => Ok(ExitCode::SUCCESS),
        Ended::Job(status) => Err(io::Error::other(format!("the command ended with {status}"))),
        Ended::TimedOut => Err(io::Error::other("the command did not end in time")),
        Ended::Lost(how) => Err(io::Error::other(format!("lab failure: {how}"))),
    }
}

/// What the demo's host needs: one worker of 1 GiB.
const DEMO_MEMORY_MIB: u32 = 1024;

fn demo(place: &Place) -> io::Result<ExitCode> {
    let lab = place.lab()?;
    if drover_tests::site::has_hardware_virtualization()? {
        let scratch = place.folder.join("scratch");
        fs::create_dir_all(&scratch)?;
        let site = Site {
            images: lab.images,
            scratch,
            programs: place.programs.clone(),
        };
        return demo_here(&site);
    }
    println!("no vmx or svm here: the demo runs in an emulated KVM host (a few minutes)");
    let site = serde_json::to_string(&shards::site_in_host())?;
    in_host(
        place,
        &lab,
        "demo",
        &HostJob {
            job: format!("set -o pipefail; ./drover-lab demo-here --site '{site}' 2>&1 | cat"),
            memory_mib: DEMO_MEMORY_MIB,
            timeout: Duration::from_secs(900),
        },
    )
    .map(|_| ExitCode::SUCCESS)
}

fn demo_here(site: &Site) -> io::Result<ExitCode> {
    let folder = site.scratch.join("demo");
    fs::create_dir_all(&folder)?;
    let scene = stories::Scene {
        site: site.clone(),
        folder,
    };
    drover_tests::demo::run(&scene).map_err(io::Error::other)?;
    fs::remove_dir_all(&scene.folder)?;
    Ok(ExitCode::SUCCESS)
}

/// One job for an emulated host.
struct HostJob {
    job: String,
    memory_mib: u32,
    timeout: Duration,
}

/// Runs a job that must succeed, in a second host if the first is lost; returns what the host shared.
fn in_host(place: &Place, lab: &Lab, name: &str, job: &HostJob) -> io::Result<PathBuf> {
    for attempt in 1..=2 {
        let host = Host {
            lab,
            folder: place.folder.join(format!("{name}-attempt-{attempt}")),
            programs: place.programs()?,
            job: job.job.clone(),
            memory_mib: job.memory_mib + shards::HOST_MEMORY_MIB,
            timeout: job.timeout,
            echo: "",
        };
        match host.run()? {
            Ended::Job(0) => return Ok(host.share()),
            Ended::Job(status) => {
                return Err(io::Error::other(format!("{name} ended with {status}")));
            }
            Ended::TimedOut => return Err(io::Error::other(format!("{name} did not end in time"))),
            Ended::Lost(how) => eprintln!("lab failure: {how}"),
        }
    }
    Err(io::Error::other(
        "lab failure: two emulated hosts were lost",
    ))
}

fn bench(
    place: &Place,
    what: Benchmark,
    options: &bench::block::Options,
    json: &Path,
) -> io::Result<ExitCode> {
    let rounds = options.pairs.unwrap_or(what.rounds());
    let lab = place.lab()?;
    let scratch = place.folder.join("scratch");
    fs::create_dir_all(&scratch)?;
    let site = Site {
        images: lab.images.clone(),
        scratch: scratch.clone(),
        programs: place.programs.clone(),
    };
    let report = match what {
        Benchmark::Boot if drover_tests::site::has_hardware_virtualization()? => {
            bench::boot::run(&site, &scratch, rounds)
        }
        Benchmark::Boot => return bench_boot_in_host(place, &lab, rounds, json),
        Benchmark::Start => bench::start::run(&site.program("drover-vmm"), &scratch, rounds),
        Benchmark::Provision => bench::provision::run(
            &stories::Scene {
                site,
                folder: scratch,
            },
            rounds,
        ),
        Benchmark::Block => return bench_block(place, options, json),
    };
    write_report(&report.map_err(io::Error::other)?, json)
}

/// Times are reported, not judged: the exit status only says whether everything could be measured.
fn bench_block(
    place: &Place,
    options: &bench::block::Options,
    json: &Path,
) -> io::Result<ExitCode> {
    let report = bench::block::run(&place.folder, &place.programs.join("drover"), options)
        .map_err(io::Error::other)?;
    fs::write(json, serde_json::to_string_pretty(&report)? + "\n")?;
    println!("{}", json.display());
    Ok(ExitCode::SUCCESS)
}

/// Writes a report, and fails if it says that a limit is not kept.
fn write_report(report: &serde_json::Value, json: &Path) -> io::Result<ExitCode> {
    let text = serde_json::to_string_pretty(report)?;
    println!("{text}");
    fs::write(json, text + "\n")?;
    Ok(verdict(report))
}

fn verdict(report: &serde_json::Value) -> ExitCode {
    let broken = bench::broken_limits(report);
    for limit in &broken {
        eprintln!("limit not kept: {limit}");
    }
    if broken.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

fn bench_boot_in_host(
    place: &Place,
    lab: &Lab,
    rounds: usize,
    json: &Path,
) -> io::Result<ExitCode> {
    let site = serde_json::to_string(&shards::site_in_host())?;
    let share = in_host(
        place,
        lab,
        "bench",
        &HostJob {
            job: format!(
                "exec ./drover-lab bench-boot --site '{site}' --rounds {rounds} --json /host/report.json"
            ),
            memory_mib: 1024,
            timeout: Duration::from_secs(120 + 90 * u64::try_from(rounds).unwrap_or(0)),
        },
    )?;
    let report = fs::read(share.join("report.json"))?;
    fs::write(json, &report)?;
    Ok(verdict(&serde_json::from_slice(&report)?))
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
            long,
            filter,
        } => test(&place, shards, &report, selected(&filter, long)),
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
        Arguments::Demo { place } => demo(&place),
        Arguments::DemoHere { site } => demo_here(&site),
        Arguments::Bench {
            place,
            what,
            rounds,
            json,
            quick,
            cases,
        } => {
            let options = bench::block::Options {
                quick,
                pairs: rounds,
                wanted: cases,
            };
            bench(&place, what, &options, &json)
        }
        Arguments::BenchBoot { site, rounds, json } => {
            let report =
                bench::boot::run(&site, &site.scratch, rounds).map_err(io::Error::other)?;
            write_report(&report, &json)
        }
        Arguments::BlockLoad { task } => {
            bench::block::run_here(&task).map_err(io::Error::other)?;
            Ok(ExitCode::SUCCESS)
        }
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
