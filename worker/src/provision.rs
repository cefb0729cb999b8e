//! Makes a worker's files, durably, or nothing.
//!
//! Nearly all the time goes into waiting for the disk, so each file is written and synced on a thread of its own: their syncs share the
//! file system's journal commits, which takes about half as long as one after the other. Order: files, then the folder that names
//! them, then the rename that makes the worker appear, then the folder above.

use std::path::{Path, PathBuf};
use std::thread::{self, ScopedJoinHandle};
use std::time::Instant;

use drover_block::image;

use crate::error::Error;
use crate::plan::{Plan, vm_yaml};
use crate::state::{Locked, StateDir, record_text, write_durable};
use crate::timeline::{Step, Timeline};

/// Makes what `plan` says; the worker is listed afterwards, but does not run.
pub(crate) fn provision(
    state: &StateDir,
    plan: &Plan,
    timeline: &mut Timeline<'_>,
) -> Result<Locked, Error> {
    let texts = Texts {
        vm: vm_yaml(&plan.vm)?,
        record: record_text(&plan.record)?,
    };
    let mut locked = state.begin(&plan.record.name)?;
    let result = fill(plan, &texts, &locked.path, timeline)
        .and_then(|()| {
            let durable = locked.handle.sync_all();
            durable.map_err(Error::io("make the folder durable", &locked.path))
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

/// What goes into the small files.
struct Texts {
    vm: String,
    record: Vec<u8>,
}

fn fill(
    plan: &Plan,
    texts: &Texts,
    folder: &Path,
    timeline: &mut Timeline<'_>,
) -> Result<(), Error> {
    let place = |path: PathBuf| folder.join(path.file_name().unwrap_or_default());
    let files = [
        (place(plan.dir.seed()), plan.seed.expose().as_slice()),
        (place(plan.dir.vm_config()), texts.vm.as_bytes()),
        (place(plan.dir.record_file()), texts.record.as_slice()),
    ];
    let overlay = place(plan.dir.overlay());
    thread::scope(|scope| {
        let overlay = scope.spawn(|| make_overlay(plan, &overlay).map(|()| Instant::now()));
        let files = files.map(|(path, contents)| {
            scope.spawn(move || write_durable(&path, contents).map(|()| Instant::now()))
        });
        timeline.reach_at(Step::Overlay, finished(overlay)?);
        let mut last = None;
        for file in files {
            last = last.max(Some(finished(file)?));
        }
        timeline.reach_at(Step::Seed, last.unwrap_or_else(Instant::now));
        Ok(())
    })
}

fn finished(thread: ScopedJoinHandle<'_, Result<Instant, Error>>) -> Result<Instant, Error> {
    thread
        .join()
        .unwrap_or_else(|_| Err(Error::Vmm("a thread that writes a file died".to_owned())))
}

fn make_overlay(plan: &Plan, path: &Path) -> Result<(), Error> {
    let options = image::CreateOptions {
        backing: Some((plan.base.clone(), plan.base_format)),
        ..image::CreateOptions::new(plan.record.disk_size_bytes)
    };
    Ok(image::create_qcow2(path, &options)?)
}
