//! The images that are measured, made by QEMU's tools.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::SIZE;
use crate::failure::{Context as _, Result};
use crate::fixtures::command::succeed;

/// How the bytes of a disk are spread over the layers of its chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shape {
    /// An empty overlay on a full base: whatever is written first allocates.
    Fresh,
    /// An overlay that has every other MiB, on a full base.
    HalfInTop,
    /// An overlay that has everything, on a full base.
    AllInTop,
    /// 32 overlays on a full base; each has one cluster of every 64, so that half of the disk is in the base.
    Deep,
    /// 2 TiB with a cluster in every 16 GiB.
    Huge,
}

const DEEP_OVERLAYS: u64 = 32;
const CLUSTER: u64 = 65_536;
const HUGE: u64 = 2 << 40;

/// A chain of qcow2 images.
#[derive(Serialize, Deserialize)]
pub(super) struct Chain {
    /// Top first.
    pub(super) layers: Vec<PathBuf>,
    /// Size of the disk.
    pub(super) size: u64,
    /// What the top is made of before each run, if runs change it.
    fresh: Option<PathBuf>,
}

impl Chain {
    /// Makes a chain in a folder, in place of what an earlier one left.
    pub(super) fn make(folder: &Path, shape: Shape) -> Result<Self> {
        if shape == Shape::Huge {
            let top = folder.join("huge.qcow2");
            create(&top, None, HUGE)?;
            write(&top, (0..HUGE).step_by(16 << 30).map(|at| (at, CLUSTER)))?;
            return Ok(Self {
                layers: vec![top],
                size: HUGE,
                fresh: None,
            });
        }
        let base = folder.join("base.qcow2");
        create(&base, None, SIZE)?;
        write(&base, std::iter::once((0, SIZE)))?;
        let mut layers = vec![base];
        let overlays = if shape == Shape::Deep {
            DEEP_OVERLAYS
        } else {
            1
        };
        for number in 1..=overlays {
            let top = folder.join(format!("overlay-{number}.qcow2"));
            create(&top, layers.first().map(PathBuf::as_path), SIZE)?;
            let pieces = |first: u64, step: u64, length: u64| {
                (first..SIZE)
                    .step_by(usize::try_from(step).unwrap_or(usize::MAX))
                    .map(move |at| (at, length))
            };
            match shape {
                Shape::Fresh | Shape::Huge => {}
                Shape::HalfInTop => write(&top, pieces(0, 2 << 20, 1 << 20))?,
                Shape::AllInTop => write(&top, pieces(0, SIZE, SIZE))?,
                Shape::Deep => write(&top, pieces(number * CLUSTER, 64 * CLUSTER, CLUSTER))?,
            }
            layers.insert(0, top);
        }
        let mut fresh = None;
        if let (Shape::Fresh, Some(top)) = (shape, layers.first()) {
            let kept = folder.join("fresh.qcow2");
            std::fs::copy(top, &kept).context("keep the fresh overlay")?;
            fresh = Some(kept);
        }
        Ok(Self {
            layers,
            size: SIZE,
            fresh,
        })
    }

    pub(super) fn top(&self) -> &Path {
        self.layers.first().map_or(Path::new(""), PathBuf::as_path)
    }

    /// Makes the top what it was, for the next run.
    pub(super) fn renew(&self) -> Result {
        let Some(fresh) = &self.fresh else {
            return Ok(());
        };
        std::fs::remove_file(self.top()).context("remove the overlay")?;
        std::fs::copy(fresh, self.top()).context("renew the overlay")?;
        Ok(())
    }
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

fn create(path: &Path, backing: Option<&Path>, size: u64) -> Result {
    let (path, size) = (text(path), size.to_string());
    let backing = backing.map(text);
    let mut arguments = vec!["create", "-q", "-f", "qcow2"];
    if let Some(backing) = &backing {
        arguments.extend(["-F", "qcow2", "-b", backing]);
    }
    arguments.extend([path.as_str(), size.as_str()]);
    succeed("qemu-img", &arguments).map(|_| ())
}

/// Writes pieces of an image.
fn write(path: &Path, pieces: impl Iterator<Item = (u64, u64)>) -> Result {
    let path = text(path);
    let mut commands = Vec::new();
    for (at, length) in pieces {
        let mut command = String::new();
        // Writing to a string cannot fail.
        let _ = write!(command, "write -q -P 5 {at} {length}");
        commands.push(command);
    }
    for some in commands.chunks(64) {
        let mut arguments = vec!["-t", "writeback", "-f", "qcow2"];
        for command in some {
            arguments.extend(["-c", command]);
        }
        arguments.push(&path);
        succeed("qemu-io", &arguments)?;
    }
    Ok(())
}
