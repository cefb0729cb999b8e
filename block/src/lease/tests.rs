//! The state table of leases, and what is left of one that is cut off.

use uuid::Uuid;

use super::*;

const OURS: Uuid = Uuid::from_u128(1);
const OTHER: Uuid = Uuid::from_u128(2);

fn place() -> Place {
    Place::here().unwrap()
}

fn holder() -> LeaseHolder {
    place().holder("vm one")
}

fn request() -> LeaseRequest {
    LeaseRequest {
        owner: "vm two".into(),
    }
}

struct Scene {
    folder: tempfile::TempDir,
    slot: Slot,
}

impl Scene {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("x.raw");
        std::fs::write(&image, [0; 4096]).unwrap();
        let slot = Slot::of(&image).unwrap();
        Self { folder, slot }
    }

    fn put(&self, lease: &Lease) {
        std::fs::write(self.slot.path(), serde_json::to_vec(lease).unwrap()).unwrap();
    }

    fn lease(&self) -> Lease {
        match self.slot.read().unwrap() {
            Found::Lease(lease) => lease,
            other => panic!("{other:?}"),
        }
    }

    fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.folder.path()).unwrap();
        let mut names: Vec<_> = entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }
}

#[test]
fn holders_are_judged_by_boot_namespace_process_and_machine() {
    let base = place();
    for (our_machine, their_machine) in [
        (None, None),
        (Some(OURS), None),
        (None, Some(OURS)),
        (Some(OURS), Some(OURS)),
        (Some(OURS), Some(OTHER)),
    ] {
        for same_boot in [true, false] {
            for same_namespace in [true, false] {
                for same_pid in [true, false] {
                    for same_beginning in [true, false] {
                        for running in [None, Some(77), Some(78)] {
                            let ours = Place {
                                machine: our_machine,
                                pid: 4,
                                started: 77,
                                ..base.clone()
                            };
                            let theirs = LeaseHolder {
                                machine: their_machine,
                                boot: if same_boot { base.boot } else { OTHER },
                                pid_namespace: base.pid_namespace + u64::from(!same_namespace),
                                pid: if same_pid { 4 } else { 5 },
                                started: if same_beginning { 77 } else { 78 },
                                ..holder()
                            };
                            let same_machine =
                                our_machine.is_some() && our_machine == their_machine;
                            let wanted = if !same_boot {
                                if same_machine {
                                    Verdict::Gone
                                } else {
                                    Verdict::Elsewhere
                                }
                            } else if !same_namespace {
                                Verdict::Gone
                            } else if same_pid && same_beginning {
                                Verdict::Own
                            } else if running == Some(theirs.started) {
                                Verdict::Alive
                            } else {
                                Verdict::Gone
                            };
                            let verdict = ours.judge(&theirs, |pid| {
                                assert_eq!(pid, theirs.pid);
                                running
                            });
                            assert_eq!(verdict, wanted, "{ours:?} {theirs:?} {running:?}");
                        }
                    }
                }
            }
        }
    }
}

/// What lies beside an image, by name, and what comes of it: the epoch of one that takes it, and whether one that only writes may.
#[test]
fn every_state_lets_in_whom_it_should() {
    let gone = LeaseHolder {
        pid: u32::MAX,
        ..holder()
    };
    let elsewhere = LeaseHolder {
        boot: OTHER,
        machine: None,
        host: "node-7".into(),
        ..holder()
    };
    // The first process of a host or container runs.
    let alive = LeaseHolder {
        pid: 1,
        started: record::started(1).unwrap(),
        ..holder()
    };
    let held = |holder| Lease {
        holder: Some(holder),
        ..Lease::free(7)
    };
    let superseded = Lease {
        superseded_by: Some("/images/overlay.qcow2".into()),
        ..Lease::free(7)
    };
    let cases = [
        ("nothing", None, Ok(1), true),
        ("free", Some(Lease::free(7)), Ok(8), true),
        ("own", Some(held(holder())), Ok(7), true),
        ("gone", Some(held(gone)), Ok(8), true),
        (
            "alive",
            Some(held(alive)),
            Err("which runs: stop it first"),
            false,
        ),
        (
            "elsewhere",
            Some(held(elsewhere)),
            Err("on node-7) since"),
            false,
        ),
        (
            "superseded",
            Some(superseded),
            Err("`/images/overlay.qcow2`"),
            false,
        ),
    ];
    for (name, lease, takes, writes) in cases {
        let scene = Scene::new();
        if let Some(lease) = &lease {
            scene.put(lease);
        }
        let image = scene.slot.image().to_owned();
        assert_eq!(check(&image, None).is_ok(), writes, "{name}");
        let before = scene.slot.read().unwrap();
        match (take(&image, &request()), takes) {
            (Ok(held), Ok(epoch)) => {
                assert_eq!(held.epoch(), epoch, "{name}");
                let lease = scene.lease();
                assert_eq!(lease.epoch, epoch, "{name}");
                assert_eq!(lease.holder.unwrap().owner, "vm two", "{name}");
                assert_eq!(read(&image).unwrap().unwrap().1, LeaseStanding::Own);
                assert!(held.is_ours());
                drop(held);
                assert_eq!(scene.lease(), Lease::free(epoch), "{name}");
            }
            (Err(error), Err(reason)) => {
                let message = error.to_string();
                assert!(message.contains(reason), "{name}: {message}");
                assert!(message.contains("x.raw"), "{name}: {message}");
                assert_eq!(message.lines().count(), 1, "{name}: {message}");
                let after = scene.slot.read().unwrap();
                assert_eq!(format!("{before:?}"), format!("{after:?}"), "{name}");
            }
            (Ok(_), Err(reason)) => panic!("{name} was taken, in spite of: {reason}"),
            (Err(error), Ok(_)) => panic!("{name}: {error}"),
        }
        if name == "superseded" {
            check(&image, Some(Path::new("/images/overlay.qcow2"))).unwrap();
            check(&image, Some(Path::new("/images/other.qcow2"))).unwrap_err();
        }
        let names = scene.names();
        assert!(names.len() <= 2, "{name}: {names:?}");
    }
}

#[test]
fn a_damaged_lease_is_refused_and_can_be_broken() {
    for text in ["", "{", "[1]", "{\"version\": 2, \"epoch\": 1}", "\0\0\0"] {
        let scene = Scene::new();
        std::fs::write(scene.slot.path(), text).unwrap();
        let image = scene.slot.image();
        let message = check(image, None).unwrap_err().to_string();
        assert!(message.contains("lease break"), "{message}");
        assert!(take(image, &request()).is_err());
        assert_eq!(break_lease(image).unwrap(), None);
        assert!(take(image, &request()).unwrap().epoch() > 1_000_000_000);
    }
    let scene = Scene::new();
    std::os::unix::fs::symlink("/dev/zero", scene.slot.path()).unwrap();
    check(scene.slot.image(), None).unwrap_err();
}

#[test]
fn a_lease_of_another_host_is_broken_and_its_holder_finds_out() {
    let scene = Scene::new();
    let image = scene.slot.image();
    let far = Place {
        boot: OTHER,
        machine: Some(OTHER),
        ..place()
    };
    let theirs = take_from(&scene.slot, &request(), &far).unwrap();
    assert_eq!(read(image).unwrap().unwrap().1, LeaseStanding::Elsewhere);
    let message = check(image, None).unwrap_err().to_string();
    assert!(message.contains("lease break"), "{message}");
    assert_eq!(break_lease(image).unwrap().unwrap().epoch, 1);
    assert!(!theirs.is_ours());
    let ours = take(image, &request()).unwrap();
    assert_eq!(ours.epoch(), 3);
    // That the other one gives back what it has no more harms nobody.
    drop(theirs);
    assert_eq!(scene.lease().holder.unwrap().owner, "vm two");
    assert!(ours.is_ours());
}

#[test]
fn an_image_that_goes_on_in_an_overlay_is_written_again_once_that_was_committed() {
    let scene = Scene::new();
    let image = scene.slot.image();
    let overlay = scene.folder.path().join("overlay.qcow2");
    let held = take(image, &request()).unwrap();
    held.keep();
    drop(held);
    assert_eq!(read(image).unwrap().unwrap().1, LeaseStanding::Own);
    supersede(image, &overlay).unwrap();
    assert_eq!(read(image).unwrap().unwrap().1, LeaseStanding::Superseded);
    take(image, &request()).map(drop).unwrap_err();
    restore(image, Path::new("/elsewhere")).unwrap_err();
    restore(image, &overlay).unwrap();
    assert_eq!(read(image).unwrap().unwrap().1, LeaseStanding::Free);
    // Twice is once.
    restore(image, &overlay).unwrap();
    let held = take(image, &request()).unwrap();
    held.keep();
    drop(held);
    give_back(image).unwrap();
    assert_eq!(read(image).unwrap().unwrap().1, LeaseStanding::Free);
}

#[test]
fn whoever_is_cut_off_leaves_the_old_lease_or_the_new_one() {
    let old = Lease {
        holder: Some(LeaseHolder {
            pid: u32::MAX,
            ..holder()
        }),
        ..Lease::free(7)
    };
    let mut cuts = 0;
    loop {
        let scene = Scene::new();
        scene.put(&old);
        cut::STEPS_LEFT.set(Some(cuts));
        let result = take(scene.slot.image(), &request());
        cut::STEPS_LEFT.set(None);
        let is_over = result.is_ok();
        if let Ok(held) = &result {
            held.keep();
        }
        drop(result);
        let lease = scene.lease();
        assert!(lease == old || lease.epoch == 8, "cut {cuts}: {lease:?}");
        // The next one of this host gets it, and nothing of the attempt is left.
        let epoch = take(scene.slot.image(), &request()).unwrap().epoch();
        assert_eq!(epoch, 8, "cut {cuts}");
        assert_eq!(scene.names(), ["x.raw", "x.raw.lease"], "cut {cuts}");
        if is_over {
            break;
        }
        cuts += 1;
    }
    assert!(cuts >= 6, "{cuts}");
}

#[test]
fn a_lease_that_is_given_back_in_place_is_one_sector() {
    let scene = Scene::new();
    let long = LeaseRequest {
        owner: "\u{1F980}\n".repeat(100),
    };
    let held = take(scene.slot.image(), &long).unwrap();
    let size = std::fs::metadata(scene.slot.path()).unwrap().len();
    // The strings that a host chooses may make it longer than the sector, and the write of that still begins with one.
    assert!((512..1024).contains(&size), "{size}");
    drop(held);
    assert_eq!(scene.lease(), Lease::free(1));
    assert_eq!(std::fs::metadata(scene.slot.path()).unwrap().len(), size);
}

#[test]
fn times_are_told_in_utc() {
    use std::time::Duration;
    for (seconds, text) in [
        (0, "1970-01-01T00:00:00Z"),
        (951_782_400, "2000-02-29T00:00:00Z"),
        (1_709_251_199, "2024-02-29T23:59:59Z"),
        (4_107_542_400, "2100-03-01T00:00:00Z"),
    ] {
        let time = UNIX_EPOCH + Duration::from_secs(seconds);
        assert_eq!(record::utc(time), text);
    }
}

#[test]
fn the_last_transfers_of_a_holder_that_was_killed_are_waited_for() {
    let scene = Scene::new();
    let image = scene.slot.image().to_owned();
    let mut child = std::process::Command::new("true").spawn().unwrap();
    child.wait().unwrap();
    let killed = LeaseHolder {
        pid: child.id(),
        started: 1,
        ..holder()
    };
    let held = |holder| Lease {
        holder: Some(holder),
        ..Lease::free(1)
    };
    // Longer than a lock is waited for that anybody may have.
    let busy = std::time::Duration::from_millis(600);
    let open = || BlockFile::open(&image, Cache::Buffered, true).unwrap();

    scene.put(&held(killed));
    let lingering = open();
    lingering.lock_only(Access::Write).unwrap();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| open().lock(Access::Write));
        std::thread::sleep(busy);
        assert!(!waiting.is_finished());
        drop(lingering);
        waiting.join().unwrap().unwrap();
    });

    // Of one that runs, here another holder than the one who locks, nothing is waited for that long.
    scene.put(&Lease::free(1));
    let using = open();
    using.lock_only(Access::Write).unwrap();
    let began = std::time::Instant::now();
    open().lock(Access::Write).unwrap_err();
    assert!(began.elapsed() < std::time::Duration::from_secs(2));
    drop(using);
    open().lock(Access::Write).unwrap();
}

#[test]
fn the_holder_goes_on_with_its_lease_without_writing_anything() {
    use std::os::unix::fs::MetadataExt;
    let scene = Scene::new();
    let file = || std::fs::metadata(scene.slot.path()).unwrap().ino();
    let held = take_from(&scene.slot, &request(), &place()).unwrap();
    held.keep();
    drop(held);
    let (before, lease) = (file(), scene.lease());
    // As on a full file system: no step that writes may be made.
    cut::STEPS_LEFT.set(Some(0));
    let again = take_from(&scene.slot, &request(), &place());
    cut::STEPS_LEFT.set(None);
    let again = again.unwrap();
    assert_eq!((file(), scene.lease()), (before, lease));
    assert!(again.is_ours());
    drop(again);
    assert_eq!(scene.lease().holder, None);
    // Another owner of this process has it written anew.
    let held = take_from(&scene.slot, &request(), &place()).unwrap();
    held.keep();
    let other = LeaseRequest {
        owner: "vm three".into(),
    };
    let other = take_from(&scene.slot, &other, &place()).unwrap();
    assert_eq!(scene.lease().holder.unwrap().owner, "vm three");
    drop((held, other));
}
