//! `drover image check` and `repair`: whether an image is sound, and making it so.

use std::process::ExitCode;

use clap::Args;
use drover_block::image::{self, CheckReport, Repair, RepairReport};

use super::image_chain::failure;
use crate::args::{ImagePath, OutputMode};
use crate::failure::Failure;
use crate::output;

/// An image and what may be repaired in it.
#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("what").required(true).args(["leaks", "all"]))]
pub(crate) struct RepairArgs {
    #[command(flatten)]
    pub(crate) image: ImagePath,
    /// Give back space that nothing uses, and nothing else.
    #[arg(long)]
    pub(crate) leaks: bool,
    /// Put right whatever can be.
    #[arg(long)]
    pub(crate) all: bool,
}

/// Exit code 1 if the image is not clean.
pub(crate) fn check(args: &ImagePath, mode: OutputMode) -> Result<ExitCode, Failure> {
    let report = image::check(&args.path, args.format.into()).map_err(failure)?;
    output::print(mode, &report, describe)?;
    Ok(code(&report))
}

/// Exit code 1 if something is left.
pub(crate) fn repair(args: &RepairArgs, mode: OutputMode) -> Result<ExitCode, Failure> {
    let what = match args.all {
        true => Repair::All,
        false => Repair::Leaks,
    };
    let image = &args.image;
    let report = image::repair(&image.path, image.format.into(), what).map_err(failure)?;
    output::print(mode, &report, |report: &RepairReport| {
        if !report.changed {
            return "clean: there was nothing to repair".to_owned();
        }
        let errors = report
            .before
            .corruptions
            .saturating_sub(report.after.corruptions);
        let leaks = report.before.leaks.saturating_sub(report.after.leaks);
        let mut text = format!(
            "repaired {}, gave back {}\n",
            counted(errors, "error"),
            counted(leaks, "leaked cluster")
        );
        text.push_str(&describe(&report.after));
        if report.after.corruptions > 0 {
            text.push_str(
                "\nwhat is left cannot be repaired, since what those entries meant is lost: save what can be read with `drover image convert`",
            );
        }
        text
    })?;
    Ok(code(&report.after))
}

fn code(report: &CheckReport) -> ExitCode {
    match report.is_clean() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    }
}

fn counted(count: u64, what: &str) -> String {
    match count {
        1 => format!("1 {what}"),
        count => format!("{count} {what}s"),
    }
}

fn describe(report: &CheckReport) -> String {
    let mut text: String = report
        .findings
        .iter()
        .map(|finding| format!("{finding}\n"))
        .collect();
    let found = report.leaks + report.corruptions;
    if found > report.findings.len() as u64 {
        let more = found - report.findings.len() as u64;
        text.push_str(&format!("and {more} more\n"));
    }
    text.push_str(&match (report.corruptions, report.leaks) {
        (0, 0) => "clean".to_owned(),
        (0, leaks) => format!(
            "sound, but {} of space that nothing uses: `drover image repair --leaks` gives it back",
            counted(leaks, "leaked cluster")
        ),
        (corruptions, leaks) => format!(
            "damaged: {}, {}; do not write it: keep a copy, then `drover image repair --all`",
            counted(corruptions, "error"),
            counted(leaks, "leaked cluster")
        ),
    });
    text
}
