//! An image that a VM holds is touched by no subcommand of `drover image`.

use std::fs;
use std::path::Path;

use serde_json::json;

use crate::ensure;
use crate::failure::{Failure, Result};
use crate::fixtures::command::{ask, succeed};
use crate::fixtures::guest::SmallGuest;
use crate::fixtures::vm::{Vm, small_guest};
use crate::stories::disk::{overlay, overlay_disk, text};
use crate::stories::{Scene, Story};

pub(super) static STORIES: &[Story] = &[Story::small(
    "held",
    "every_image_command_refuses_an_image_that_a_vm_holds",
    refused,
)];

/// Calls of a subcommand that would touch the image `held`, whose base is `base`; `spare` is a path that is free.
/// `None` for a subcommand that this story does not know.
fn calls(subcommand: &str, held: &str, base: &str, spare: &str) -> Option<Vec<Vec<String>>> {
    let chain = ["--backing", base, "--backing-format", "qcow2"];
    let plain = ["--format", "qcow2"];
    let call = |parts: &[&[&str]]| -> Vec<String> {
        let words = [subcommand].into_iter().chain(parts.concat());
        words.map(str::to_owned).collect()
    };
    Some(match subcommand {
        "info" | "check" => vec![call(&[&[held], &plain])],
        "create" => vec![call(&[&[held, "1GiB"], &plain])],
        "resize" => vec![
            call(&[&[held, "2GiB"], &plain, &chain]),
            call(&[&[base, "2GiB"], &plain]),
        ],
        "map" | "commit" | "flatten" => vec![call(&[&[held], &plain, &chain])],
        "compare" => vec![call(&[
            &[held, base],
            &plain,
            &["--second-format", "qcow2", "--allow-backing"],
        ])],
        "convert" => vec![
            call(&[&[held, spare], &plain, &chain, &["--to", "raw"]]),
            call(&[&[base, held], &plain, &["--to", "qcow2"]]),
        ],
        "repair" => vec![
            call(&[&[held, "--leaks"], &plain]),
            call(&[&[base, "--all"], &plain]),
        ],
        "rebase" => vec![
            call(&[&[held], &plain, &chain, &["--onto-nothing"]]),
            call(&[&[held], &plain, &chain, &["--onto-nothing", "--unsafe"]]),
        ],
        "import" => vec![
            call(&[&[held, spare], &plain, &["--to", "raw"]]),
            call(&[&[base, held], &plain, &["--to", "qcow2"]]),
        ],
        "bench" => vec![
            call(&[&[held], &plain, &chain, &["--count", "1"]]),
            call(&[&[held], &plain, &chain, &["--count", "1", "--write"]]),
        ],
        "export" => vec![call(&[&[held, "--vhost-user-blk", spare], &plain, &chain])],
        "lease" => vec![call(&[&["break", held]])],
        "snapshot" => vec![call(&[&[held, spare], &plain])],
        _ => return None,
    })
}

/// The names of the subcommands that the program says it has.
fn subcommands(drover: &Path) -> Result<Vec<String>> {
    let help = succeed(drover, &["image", "--help"])?;
    let names: Vec<String> = help
        .lines()
        .skip_while(|line| !line.starts_with("Commands:"))
        .skip(1)
        .take_while(|line| line.starts_with(' '))
        // Further lines of a description are indented deeper.
        .filter(|line| line.starts_with("  ") && !line.starts_with("   "))
        .filter_map(|line| line.split_whitespace().next().map(str::to_owned))
        .filter(|name| name != "help")
        .collect();
    ensure!(names.len() >= 10, "subcommands in {help:?}: {names:?}");
    Ok(names)
}

fn refused(scene: &Scene) -> Result {
    let drover = scene.site.program("drover");
    let (base, top) = overlay(scene)?;
    let guest = SmallGuest::prepare(scene)?;
    let mut definition = small_guest(&guest, &scene.folder);
    definition["disks"] = json!([overlay_disk(&base, &top)]);
    let vm = Vm::boot(scene, &definition)?;
    let spare = scene.folder.join("spare");
    let (before, base_before) = (fs::read(&top)?, fs::metadata(&base)?.modified()?);
    for subcommand in subcommands(&drover)? {
        let calls =
            calls(&subcommand, &text(&top), &text(&base), &text(&spare)).ok_or_else(|| {
                Failure::Broken(format!(
                    "this story does not know `drover image {subcommand}`"
                ))
            })?;
        for arguments in calls {
            let mut words = vec!["image"];
            words.extend(arguments.iter().map(String::as_str));
            let answer = ask(&drover, &words)?;
            println!(
                "drover {} -> {}: {}",
                words.join(" "),
                answer.status,
                answer.stderr.trim()
            );
            ensure!(
                answer.status != 0,
                "drover {} touched an image that a VM holds",
                words.join(" ")
            );
            // Somebody has it, or it is there already; nothing else may be what stops a command.
            let why = ["process", "exist", "lease", "holds"];
            ensure!(
                answer.stderr.contains(".qcow2")
                    && why.iter().any(|word| answer.stderr.contains(word)),
                "drover {} does not say who has which image: {}",
                words.join(" "),
                answer.stderr
            );
            ensure!(
                !spare.exists(),
                "drover {} left {}",
                words.join(" "),
                spare.display()
            );
        }
    }
    ensure!(
        fs::read(&top)? == before && fs::metadata(&base)?.modified()? == base_before,
        "an image has changed"
    );
    // QEMU's tools keep to the same locks.
    let answer = ask("qemu-img", &["check", "-f", "qcow2", &text(&top)])?;
    ensure!(
        answer.status != 0 && answer.stderr.contains("lock"),
        "qemu-img check of a held image: {} {}",
        answer.status,
        answer.stderr
    );
    vm.power_off()
}
