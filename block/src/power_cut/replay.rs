//! What a power cut leaves of files, from the tape of what was done to them; and what both checkers say of it.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::scene::{Random, SECTOR, Scene, is_dirty};
use crate::io::tape::Event;
use crate::{Format, image};

/// An event that changes the file, and when it may have reached the medium.
struct Change<'a> {
    event: &'a Event,
    over: bool,
    durable: bool,
}

/// What a recording did to one file, played up to a point.
struct Replay<'a> {
    /// The file with the first `settled` changes, all of them durable.
    file: Vec<u8>,
    settled: usize,
    /// Whether anything has been done to the file on the medium, be it by an earlier cut.
    written: bool,
    changes: Vec<Change<'a>>,
    by_id: HashMap<usize, usize>,
    /// For every fdatasync under way, the changes that were over when it began.
    syncs: HashMap<usize, Vec<usize>>,
}

impl<'a> Replay<'a> {
    fn new(file: Vec<u8>) -> Self {
        Self {
            file,
            settled: 0,
            written: false,
            changes: Vec::new(),
            by_id: HashMap::new(),
            syncs: HashMap::new(),
        }
    }

    fn change(&mut self, id: usize, event: &'a Event, over: bool) {
        self.written = true;
        self.by_id.insert(id, self.changes.len());
        self.changes.push(Change {
            event,
            over,
            durable: false,
        });
    }

    fn sync(&mut self, id: usize) {
        let changes = self.changes.iter().enumerate().skip(self.settled);
        let over = changes
            .filter(|(_, c)| c.over && !c.durable)
            .map(|(n, _)| n);
        self.syncs.insert(id, over.collect());
    }

    fn end(&mut self, id: usize) {
        if let Some(change) = self.by_id.get(&id) {
            self.changes[*change].over = true;
        }
        for change in self.syncs.remove(&id).into_iter().flatten() {
            self.changes[change].durable = true;
        }
        while self.changes.get(self.settled).is_some_and(|c| c.durable) {
            apply(&mut self.file, self.changes[self.settled].event, |_| true);
            self.settled += 1;
        }
    }

    /// The file as a cut now may leave it.
    fn cut(&self, random: &mut Random) -> Vec<u8> {
        let mut file = self.file.clone();
        for change in &self.changes[self.settled..] {
            let fate = if change.durable { 0 } else { random.below(3) };
            apply(&mut file, change.event, |random_sector| {
                fate == 0 || fate == 2 && random_sector && random.below(2) == 0
            });
        }
        file
    }
}

/// The files of a scene, numbered as on its tape.
pub(super) struct Medium<'a> {
    files: Vec<(PathBuf, Format, Replay<'a>)>,
}

impl<'a> Medium<'a> {
    /// The files as they are now.
    pub(super) fn new(scene: &Scene) -> Self {
        let layers = scene.layers().into_iter();
        let files = layers.map(|layer| {
            let bytes = std::fs::read(&layer.path).unwrap();
            (layer.path, layer.format, Replay::new(bytes))
        });
        Self {
            files: files.collect(),
        }
    }

    pub(super) fn play(&mut self, event: &'a Event) {
        match event {
            Event::Write { id, file, .. } | Event::Punch { id, file, .. } => {
                self.files[*file].2.change(*id, event, false);
            }
            Event::Truncate { id, file, .. } => self.files[*file].2.change(*id, event, true),
            Event::Sync { id, file } => self.files[*file].2.sync(*id),
            Event::End { id } => {
                for (_, _, replay) in &mut self.files {
                    replay.end(*id);
                }
            }
            Event::Mark(_) => {}
        }
    }

    /// Leaves the files as a cut now may leave them, and asserts that every image is sound.
    pub(super) fn cut(&self, random: &mut Random, what: &str) {
        for (path, format, replay) in &self.files {
            if !replay.written {
                continue;
            }
            std::fs::write(path, replay.cut(random)).unwrap();
            if *format == Format::Qcow2 {
                let report = image::check(path, Format::Qcow2).unwrap();
                let sound = report.corruptions == 0 || is_dirty(path);
                assert!(sound, "{what}: {}: {report:?}", path.display());
            }
        }
    }

    /// Asserts that QEMU says of every image that was written what we say.
    pub(super) fn agreed(&self) {
        for (path, format, replay) in &self.files {
            if *format == Format::Qcow2 && replay.written {
                agreed(path);
            }
        }
    }
}

/// Does a change as far as `survives` says, sector by sector; a punch and a new length survive as a whole.
fn apply(file: &mut Vec<u8>, event: &Event, mut survives: impl FnMut(bool) -> bool) {
    match event {
        Event::Write { at, bytes, .. } => {
            for (n, sector) in bytes.chunks(SECTOR).enumerate() {
                if survives(true) {
                    let at = *at as usize + n * SECTOR;
                    file.resize(file.len().max(at + sector.len()), 0);
                    file[at..at + sector.len()].copy_from_slice(sector);
                }
            }
        }
        Event::Punch { at, length, .. } => {
            let end = (*at + *length).min(file.len() as u64) as usize;
            if survives(true)
                && let Some(hole) = file.get_mut(*at as usize..end)
            {
                hole.fill(0);
            }
        }
        Event::Truncate { length, .. } => {
            if survives(true) {
                file.resize(*length as usize, 0);
            }
        }
        Event::Sync { .. } | Event::End { .. } | Event::Mark(_) => {}
    }
}

/// (leaks, corruptions) according to QEMU.
pub(super) fn judged(path: &Path) -> (u64, u64) {
    let output = Command::new("qemu-img")
        .args(["check", "-f", "qcow2", "--output=json"])
        .arg(path)
        .output()
        .expect("qemu-img is installed by `cargo xtask setup`");
    let report = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(report.contains("\"filename\""), "{report}");
    let number = |key: &str| -> u64 {
        let rest = report.split(&format!("\"{key}\": ")).nth(1);
        rest.map_or(0, |rest| {
            let digits = rest.split(|c: char| !c.is_ascii_digit()).next();
            digits.and_then(|d| d.parse().ok()).unwrap_or(0)
        })
    };
    (number("leaks"), number("corruptions"))
}

/// Asserts that both checkers say the same of an image; what they say.
pub(super) fn agreed(path: &Path) -> (u64, u64) {
    let judged = judged(path);
    let own = image::check(path, Format::Qcow2).unwrap();
    assert_eq!(
        (own.leaks, own.corruptions > 0),
        (judged.0, judged.1 > 0),
        "the checkers disagree: {own:?}"
    );
    judged
}
