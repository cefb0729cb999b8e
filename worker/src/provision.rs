//! Makes a worker's files, durably, or nothing.
//!
//! The overlay and the seed are made side by side, since most of the time goes into waiting for the disk: their syncs then
//! share the file system's journal commits. Order: files, then the folder that names them, then the rename that makes the worker
//! appear, then the folder above.

use std::path::{Path, PathBuf};
use std::thread;
use std::time::Instant;

use drover_block::image;

use crate::error::Error;
use crate::plan::{Plan, vm_yaml};
use crate::state::{Locked, StateDir, write_private, write_record};
use crate::timeline::{Step, Timeline};

/// Makes what `plan` says; the worker is listed afterwards, but does not run.
pub(crate) fn provision(
    state: &StateDir,
    plan: &Plan,
    timeline: &mut Timeline<'_>,
) -> Result<Locked, Error> {
    let vm = vm_yaml(&plan.vm)?;
    let mut locked = state.begin(&plan.record.name)?;
    let result = fill(plan, &locked.path, &vm, timeline)
        .and_then(|()| {
            locked
                .handle
                .sync_all()
                .map_err(Error::io("make the folder durable", &locked.path))
        })
        .and_then(|()| state.publish(&mut locked, &plan.dir));
    match result {
        Ok(()) => {
            timeline.reach(Step::Durable);
            Ok(locked)
        }
        Err(error) => {
            // The first error is the one to tell; what cannot be removed now is swept by the next maker.
            let _ = state.remove(&plan.record.name, &locked);
            Err(error)
        }
    }
}

fn fill(plan: &Plan, folder: &Path, vm: &str, timeline: &mut Timeline<'_>) -> Result<(), Error> {
    let overlay_path = place(folder, &plan.dir.overlay());
    thread::scope(|scope| {
        let overlay = scope.spawn(|| make_overlay(plan, &overlay_path).map(|()| Instant::now()));
        let others = make_small_files(plan, folder, vm).map(|()| Instant::now());
        let overlay = overlay.join().unwrap_or_else(|_| {
            Err(Error::Vmm(
                "the thread that makes the overlay died".to_owned(),
            ))
        });
        timeline.reach_at(Step::Overlay, overlay?);
        timeline.reach_at(Step::Seed, others?);
        Ok(())
    })
}

fn make_overlay(plan: &Plan, path: &Path) -> Result<(), Error> {
    let options = image::CreateOptions {
        backing: Some((plan.base.clone(), plan.base_format)),
        ..image::CreateOptions::new(plan.record.disk_size_bytes)
    };
    Ok(image::create_qcow2(path, &options)?)
}

fn make_small_files(plan: &Plan, folder: &Path, vm: &str) -> Result<(), Error> {
    let files = [
        write_private(&place(folder, &plan.dir.seed()), plan.seed.expose())?,
        write_private(&place(folder, &plan.dir.vm_config()), vm.as_bytes())?,
        write_record(folder, &plan.record)?,
    ];
    for file in &files {
        file.sync_all()
            .map_err(Error::io("make the files durable in", folder))?;
    }
    Ok(())
}

/// Where a file of the worker is while its folder has another name.
fn place(folder: &Path, path: &Path) -> PathBuf {
    folder.join(path.file_name().unwrap_or_default())
}
