//! `drover worker`: create, start, list, show, console, delete.

use std::process::ExitCode;

use drover_worker::{
    Created, Definition, Deleted, End, Goal, Reached, Record, StateDir, Status, View, create,
    delete, list, restart, show,
};
use serde::Serialize;

use crate::args::{OutputMode, WaitFor, Worker, WorkerCreate, WorkerDelete};
use crate::commands::console;
use crate::failure::Failure;
use crate::output::{self, Progress};

pub(crate) fn run(
    command: Worker,
    state: &StateDir,
    mode: OutputMode,
) -> Result<ExitCode, Failure> {
    match command {
        Worker::Create(args) => create_worker(&args, state, mode)?,
        Worker::Start(args) => start_worker(state, &args.name, mode)?,
        Worker::List => output::print(mode, &list(state)?, |views| list_table(views))?,
        Worker::Show(args) => output::print(mode, &show(state, &args.name)?, details)?,
        Worker::Console(args) => return console::run(state, &args.name),
        Worker::Delete(args) => delete_worker(&args, state, mode)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// What `worker create` prints.
#[derive(Serialize)]
struct CreateReport {
    worker: Record,
    #[serde(skip_serializing_if = "Option::is_none")]
    pid: Option<i32>,
    timeline: Vec<Reached>,
}

fn create_worker(args: &WorkerCreate, state: &StateDir, mode: OutputMode) -> Result<(), Failure> {
    let goal = match args.wait {
        _ if args.no_start => Goal::Provisioned,
        WaitFor::Started => Goal::Started,
        WaitFor::Joined => Goal::Joined {
            timeout: args.timeout,
        },
    };
    let definition = Definition::load(&args.file)?;
    let mut progress = Progress::new(mode, "making the disk and the seed", args.follow);
    let result = create(state, &args.name, &definition, goal, &mut progress);
    progress.finish();
    let Created {
        record,
        timeline,
        pid,
    } = result?;
    output::print(
        mode,
        &CreateReport {
            worker: record,
            pid,
            timeline,
        },
        |report| {
            let what = match (goal, report.worker.joins) {
                (Goal::Provisioned, _) => "is made".to_owned(),
                (Goal::Started, _) => "is started".to_owned(),
                (Goal::Joined { .. }, true) => format!("has joined as {}", report.worker.hostname),
                (Goal::Joined { .. }, false) => "is configured".to_owned(),
            };
            format!(
                "{}worker {} {what}",
                output::timeline(&report.timeline),
                report.worker.name
            )
        },
    )
}

#[derive(Serialize)]
struct StartReport<'a> {
    name: &'a str,
    pid: i32,
}

fn start_worker(state: &StateDir, name: &str, mode: OutputMode) -> Result<(), Failure> {
    let pid = restart(state, name)?;
    output::print(mode, &StartReport { name, pid }, |report| {
        format!("worker {} runs (process {})", report.name, report.pid)
    })
}

fn list_table(views: &[View]) -> String {
    if views.is_empty() {
        return "no workers".to_owned();
    }
    let rows: Vec<Vec<String>> = views
        .iter()
        .map(|view| {
            let record = view.record.as_ref();
            let of = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
            vec![
                view.name.clone(),
                view.status.label().to_owned(),
                of(record.map(|record| record.cpus.to_string())),
                of(record.map(|record| output::bytes(record.memory_size_bytes))),
                of(record.map(|record| output::bytes(record.disk_size_bytes))),
                of(view.disk_used_bytes.map(output::bytes)),
                of(record
                    .and_then(|record| record.mac)
                    .map(|mac| mac.to_string())),
            ]
        })
        .collect();
    output::table(
        &["NAME", "STATUS", "CPUS", "MEMORY", "DISK", "USED", "MAC"],
        &rows,
    )
}

fn details(view: &View) -> String {
    let mut pairs = vec![
        ("name", view.name.clone()),
        ("status", view.status.label().to_owned()),
    ];
    pairs.extend(view.pid.map(|pid| ("process", pid.to_string())));
    if let Some(record) = &view.record {
        pairs.extend([
            ("hostname", record.hostname.clone()),
            ("instance-id", record.instance_id.clone()),
            ("uuid", record.uuid.to_string()),
            ("cpus", record.cpus.to_string()),
            ("memory", output::bytes(record.memory_size_bytes)),
            ("disk", output::bytes(record.disk_size_bytes)),
        ]);
        pairs.extend(
            view.disk_used_bytes
                .map(|used| ("disk used", output::bytes(used))),
        );
        pairs.push(("base", record.base.display().to_string()));
        pairs.extend(record.mac.map(|mac| ("mac", mac.to_string())));
        pairs.extend(record.bridge.clone().map(|bridge| ("bridge", bridge)));
        pairs.extend(record.tap.clone().map(|tap| ("tap", tap)));
    }
    if view.status == Status::Damaged {
        pairs.push((
            "record",
            "missing or damaged: the worker can only be deleted".to_owned(),
        ));
    }
    pairs.extend([
        ("folder", view.folder.display().to_string()),
        ("api", view.api_socket.display().to_string()),
        ("console", view.console_socket.display().to_string()),
    ]);
    output::fields(&pairs)
}

#[derive(Serialize)]
struct DeleteReport<'a> {
    name: &'a str,
    /// `absent`, `stopped`, `shut-down` or `forced`.
    was: &'static str,
}

fn delete_worker(args: &WorkerDelete, state: &StateDir, mode: OutputMode) -> Result<(), Failure> {
    let end = if args.force {
        End::Force
    } else {
        End::Shutdown {
            timeout: args.timeout,
        }
    };
    let progress = Progress::new(
        mode,
        &format!("waiting for {} to power off", args.name),
        false,
    );
    let result = delete(state, &args.name, end);
    progress.finish();
    let (was, text) = match result? {
        Deleted::Absent => ("absent", "was not there"),
        Deleted::Stopped => ("stopped", "did not run and is deleted"),
        Deleted::ShutDown => ("shut-down", "powered off and is deleted"),
        Deleted::Forced => ("forced", "was ended by force and is deleted"),
    };
    output::print(
        mode,
        &DeleteReport {
            name: &args.name,
            was,
        },
        |report| format!("worker {} {text}", report.name),
    )
}
