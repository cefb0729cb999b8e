//! The cuts, scene by scene.

use std::collections::HashMap;
use std::path::Path;
use std::process::Command;

use super::scene::{Deed, Random, SECTOR, Scene, is_dirty, read_all};
use crate::io::tape::{self, Event};
use crate::{Format, image};

/// Cuts of all scenes together, where nobody asks for another number.
const CUTS: u64 = 20_000;
/// Scenes that share them: each has runs of its own at depth 1 and more.
const SCENES: u64 = 9;
/// One cut in so many is judged by QEMU as well.
const SAMPLE: u64 = 100;

/// An event that changes the file, and when it may have reached the medium.
struct Change<'a> {
    event: &'a Event,
    over: bool,
    durable: bool,
}

/// A recording, played up to a point.
struct Replay<'a> {
    /// The file with the first `settled` changes, all of them durable.
    file: Vec<u8>,
    settled: usize,
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
            changes: Vec::new(),
            by_id: HashMap::new(),
            syncs: HashMap::new(),
        }
    }

    fn play(&mut self, event: &'a Event) {
        match event {
            Event::Write { id, .. } | Event::Punch { id, .. } => {
                self.by_id.insert(*id, self.changes.len());
                self.changes.push(Change {
                    event,
                    over: false,
                    durable: false,
                });
            }
            Event::Sync { id } => {
                let changes = self.changes.iter().enumerate().skip(self.settled);
                let over = changes
                    .filter(|(_, c)| c.over && !c.durable)
                    .map(|(n, _)| n);
                self.syncs.insert(*id, over.collect());
            }
            Event::End { id } => {
                if let Some(change) = self.by_id.get(id) {
                    self.changes[*change].over = true;
                }
                for change in self.syncs.remove(id).into_iter().flatten() {
                    self.changes[change].durable = true;
                }
                while self.changes.get(self.settled).is_some_and(|c| c.durable) {
                    apply(&mut self.file, self.changes[self.settled].event, |_| true);
                    self.settled += 1;
                }
            }
            Event::Mark(_) => {}
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

/// Does a change as far as `survives` says, sector by sector; a punch survives as a whole.
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
        Event::Sync { .. } | Event::End { .. } | Event::Mark(_) => {}
    }
}

/// A value that a sector was given.
#[derive(Clone, Copy)]
struct Value {
    value: u8,
    deed: usize,
    weak: bool,
}

/// What each sector may hold after a cut.
struct Promise<'a> {
    sectors: Vec<Vec<Value>>,
    deeds: &'a [Deed],
    over: Vec<bool>,
    /// Deeds that were over when a flush began.
    flushes: HashMap<usize, Vec<bool>>,
    grown: bool,
}

impl<'a> Promise<'a> {
    fn new(initial: &[u8], deeds: &'a [Deed]) -> Self {
        let before = |value: &u8| {
            vec![Value {
                value: *value,
                deed: usize::MAX,
                weak: false,
            }]
        };
        Self {
            sectors: initial.iter().map(before).collect(),
            deeds,
            over: vec![false; deeds.len()],
            flushes: HashMap::new(),
            grown: false,
        }
    }

    fn play(&mut self, deed: usize) {
        match &self.deeds[deed] {
            Deed::Set {
                sectors,
                value,
                weak,
            } => {
                for values in &mut self.sectors[sectors.clone()] {
                    values.push(Value {
                        value: *value,
                        deed,
                        weak: *weak,
                    });
                }
            }
            Deed::Flush => {
                self.flushes.insert(deed, self.over.clone());
            }
            Deed::Over(other) => {
                self.over[*other] = true;
                let Some(durable) = self.flushes.remove(other) else {
                    return;
                };
                for values in &mut self.sectors {
                    let is_durable = |v: &Value| !v.weak && durable.get(v.deed) == Some(&true);
                    let last = values.iter().rposition(is_durable).unwrap_or(0);
                    values.drain(..last);
                }
            }
            Deed::Grown => self.grown = true,
        }
    }

    fn check(&self, seen: &[u8], what: &str) {
        assert!(
            !self.grown || seen.len() == self.sectors.len() * SECTOR,
            "{what}: a disk that has grown has {} bytes",
            seen.len()
        );
        for (n, (sector, values)) in seen.chunks(SECTOR).zip(&self.sectors).enumerate() {
            let good = values
                .iter()
                .any(|v| sector.iter().all(|byte| *byte == v.value));
            let values = || values.iter().map(|v| v.value).collect::<Vec<_>>();
            assert!(
                good,
                "{what}: sector {n} holds {} and not one of {:?}",
                sector[0],
                values()
            );
        }
    }
}

/// (leaks, corruptions) according to QEMU.
fn judged(path: &Path) -> (u64, u64) {
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
fn agreed(path: &Path) -> (u64, u64) {
    let judged = judged(path);
    let own = image::check(path, Format::Qcow2).unwrap();
    assert_eq!(
        (own.leaks, own.corruptions > 0),
        (judged.0, judged.1 > 0),
        "the checkers disagree: {own:?}"
    );
    judged
}

/// Cuts fresh scenes until this one's share of cuts is done.
fn cut_everywhere(new_scene: impl Fn() -> Scene, seed: u64, requests: usize, share: u64) {
    let total = std::env::var("BLOCK_POWER_CUTS")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(CUTS);
    let goal = total * share / 100 / SCENES + 1;
    let mut random = Random(seed);
    let (mut done, mut round) = (0, 0);
    let (mut syncs, mut punches) = (0, 0);
    while done < goal {
        let scene = new_scene();
        let depth = [1, 6][round % 2];
        round += 1;
        let path = &scene.spec.top.path;
        let before = std::fs::read(path).unwrap();
        let tape = tape::insert();
        let deeds = scene.run(requests, depth, &mut random, &tape);
        tape::eject();
        let events = tape.take().events;
        let count = |wanted: fn(&Event) -> bool| events.iter().filter(|e| wanted(e)).count();
        syncs += count(|e| matches!(e, Event::Sync { .. }));
        punches += count(|e| matches!(e, Event::Punch { .. }));
        let mut replay = Replay::new(before);
        let mut promise = Promise::new(&scene.initial, &deeds);
        // Every point is cut; rounds beyond the first find other subsets and other runs.
        for (n, event) in events.iter().enumerate() {
            replay.play(event);
            match event {
                Event::Mark(deed) => promise.play(*deed),
                // Nothing new can be lost since the event before.
                Event::End { .. } if n % 4 != 0 => continue,
                _ => {}
            }
            if matches!(event, Event::Mark(_)) {
                continue;
            }
            std::fs::write(path, replay.cut(&mut random)).unwrap();
            let what = format!("seed {seed} round {round} depth {depth} cut {n}");
            let report = image::check(path, Format::Qcow2).unwrap();
            assert!(
                report.corruptions == 0 || is_dirty(path),
                "{what}: {report:?}"
            );
            promise.check(&read_all(&scene.spec), &what);
            if random.below(SAMPLE) == 0 {
                agreed(path);
            }
            done += 1;
            if done >= goal && round >= 2 {
                break;
            }
        }
    }
    assert!(
        syncs > 30 && punches > 3,
        "the runs do too little: {syncs} {punches}"
    );
    println!("{done} cuts in {round} runs");
}

#[test]
fn no_cut_harms_a_disk_of_small_clusters() {
    cut_everywhere(|| Scene::plain(false, false), 1, 150, 150);
}

#[test]
fn no_cut_harms_an_overlay() {
    cut_everywhere(|| Scene::plain(false, true), 2, 150, 150);
}

#[test]
fn no_cut_harms_an_overlay_with_a_snapshot() {
    cut_everywhere(|| Scene::plain(true, true), 3, 150, 150);
}

#[test]
fn no_cut_harms_a_disk_with_a_snapshot_and_narrow_refcounts() {
    cut_everywhere(|| Scene::snapshot(4096), 4, 150, 100);
}

#[test]
fn no_cut_harms_the_top_of_a_chain() {
    cut_everywhere(Scene::chain, 5, 150, 100);
}

#[test]
fn no_cut_harms_an_overlay_on_a_compressed_base() {
    cut_everywhere(|| Scene::compressed(true, "zstd"), 6, 150, 100);
}

#[test]
fn no_cut_harms_an_image_of_compressed_clusters() {
    cut_everywhere(|| Scene::compressed(false, "zlib"), 7, 150, 100);
}

#[test]
fn no_cut_harms_a_refcount_table_that_grows() {
    cut_everywhere(Scene::refcount_growth, 8, 150, 20);
}

#[test]
fn no_cut_harms_a_disk_that_grows() {
    cut_everywhere(Scene::l1_growth, 9, 150, 100);
}

#[test]
fn no_cut_harms_a_disk_whose_refcounts_are_put_right() {
    cut_everywhere(Scene::dirty, 10, 150, 60);
}

#[test]
fn no_cut_harms_an_overlay_with_subclusters() {
    cut_everywhere(Scene::subclusters, 11, 150, 100);
}

#[test]
fn our_checker_says_of_damaged_images_what_qemu_says() {
    let scene = Scene::snapshot(512);
    let path = &scene.spec.top.path;
    let good = std::fs::read(path).unwrap();
    let mut random = Random(77);
    // Refcount blocks and L2 tables; damage to what points at them makes an image unreadable rather than unsound.
    let entry = |at: usize| u64::from_be_bytes(good[at..at + 8].try_into().unwrap());
    let mut tables: Vec<usize> = Vec::new();
    for pointer in [40, 48] {
        let table = entry(pointer) as usize;
        let entries = (0..512).step_by(8).map(|n| entry(table + n));
        let hosts = entries.map(|raw| (raw & crate::qcow2::spec::OFFSET_MASK) as usize);
        tables.extend(hosts.filter(|host| (1024..good.len()).contains(host)));
    }
    let (mut leaky, mut corrupt) = (0, 0);
    for _ in 0..150 {
        let mut bytes = good.clone();
        let table = tables[random.below(tables.len() as u64) as usize];
        let at = table + random.below(512) as usize;
        bytes[at] ^= 1 << random.below(8);
        std::fs::write(path, &bytes).unwrap();
        let (leaks, corruptions) = agreed(path);
        leaky += u32::from(leaks > 0);
        corrupt += u32::from(corruptions > 0);
    }
    assert!(
        leaky > 15 && corrupt > 15,
        "{leaky} {corrupt}: too little was damaged"
    );
}
