//! Locks: between our own disks, and with QEMU's tools in both directions.

mod common;

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use common::{Folder, TestDisk, layer, qemu_img, refusal, spec, text};
use drover_block::{Disk, DiskSpec, Format, image};

#[test]
fn a_writer_is_alone_and_readers_share() {
    let folder = Folder::new();
    let top = folder.path("x.raw");
    image::create_raw(&top, 1 << 20).unwrap();
    let writer = spec(&top, Format::Raw, &[]);
    let reader = DiskSpec {
        read_only: true,
        ..writer.clone()
    };
    let one = TestDisk::open(&reader);
    let two = TestDisk::open(&reader);
    assert!(refusal(&writer).contains("in use by another process"));
    drop(one);
    assert!(refusal(&writer).contains("in use by another process"));
    two.close();
    let one = TestDisk::open(&writer);
    assert!(refusal(&writer).contains("open for writing") || refusal(&writer).contains("in use"));
    assert!(refusal(&reader).contains("open for writing") || refusal(&reader).contains("in use"));
    one.close();
    TestDisk::open(&writer).close();
}

#[test]
fn overlays_share_a_base_and_nobody_writes_it_meanwhile() {
    let folder = Folder::new();
    let base = folder.path("base.qcow2");
    image::create_qcow2(&base, &image::CreateOptions::new(1 << 20)).unwrap();
    let overlay = |name: &str| {
        let top = folder.path(name);
        let backing = Some((base.clone(), Format::Qcow2));
        let options = image::CreateOptions {
            backing,
            ..image::CreateOptions::new(1 << 20)
        };
        image::create_qcow2(&top, &options).unwrap();
        TestDisk::open(&spec(&top, Format::Qcow2, &[layer(&base, Format::Qcow2)]))
    };
    let one = overlay("one.qcow2");
    let two = overlay("two.qcow2");
    let writer = spec(&base, Format::Qcow2, &[]);
    assert!(refusal(&writer).contains("in use by another process"));
    one.close();
    two.close();
    TestDisk::open(&writer).close();
}

/// Who uses an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum User {
    Reader,
    Writer,
}

use User::{Reader, Writer};

/// Readers share; a writer is alone. QEMU's tools that read a raw image forbid nobody anything, as it has no tables that could change
/// under them, nor do overlays that they open over one; so QEMU itself lets them in beside a writer, and so do we.
fn may_share(format: Format, ours: User, theirs: User) -> bool {
    theirs == Reader && (ours == Reader || format == Format::Raw)
}

/// A qemu-io that has an image open and waits.
struct Qemu {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Qemu {
    fn start(format: &str, image: &Path, user: User) -> Self {
        let mut arguments = vec!["-f", format];
        if user == Reader {
            arguments.push("-r");
        }
        arguments.push(text(image));
        let mut child = Command::new("qemu-io")
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("qemu-io is installed by `cargo xtask setup`");
        let mut qemu = Self {
            input: child.stdin.take().unwrap(),
            output: BufReader::new(child.stdout.take().unwrap()),
            child,
        };
        // Its answer to a command proves that it has opened the image.
        qemu.input.write_all(b"read 0 512\n").unwrap();
        let mut line = String::new();
        while !line.contains("read 512/512") {
            line.clear();
            assert!(
                qemu.output.read_line(&mut line).unwrap() > 0,
                "qemu-io has ended"
            );
        }
        qemu
    }

    fn end(self) {
        let Self {
            mut child,
            input,
            output,
        } = self;
        drop(input);
        assert!(child.wait().unwrap().success());
        drop(output);
    }
}

fn name(format: Format) -> &'static str {
    match format {
        Format::Raw => "raw",
        Format::Qcow2 => "qcow2",
    }
}

struct Scene {
    folder: Folder,
    image: PathBuf,
    format: Format,
}

impl Scene {
    fn new(format: Format) -> Self {
        let folder = Folder::new();
        let image = folder.path(&format!("x.{}", name(format)));
        qemu_img(&["create", "-q", "-f", name(format), text(&image), "1M"]);
        Self {
            folder,
            image,
            format,
        }
    }

    fn spec(&self, user: User) -> DiskSpec {
        DiskSpec {
            read_only: user == Reader,
            ..spec(&self.image, self.format, &[])
        }
    }

    fn overlay(&self) -> DiskSpec {
        let path = self.folder.path("overlay.qcow2");
        if !path.exists() {
            let base = text(&self.image);
            let format = name(self.format);
            let overlay = text(&path);
            qemu_img(&[
                "create", "-q", "-f", "qcow2", "-b", base, "-F", format, overlay,
            ]);
        }
        spec(&path, Format::Qcow2, &[layer(&self.image, self.format)])
    }

    /// Each way in which we can have the image open, as its top or below an overlay, and what that makes us to others.
    fn ours(&self) -> [(User, DiskSpec); 3] {
        [
            (Reader, self.spec(Reader)),
            (Writer, self.spec(Writer)),
            (Reader, self.overlay()),
        ]
    }

    fn qemu_io(&self, user: User) -> Result<(), String> {
        let mut arguments = vec!["-f", name(self.format)];
        if user == Reader {
            arguments.push("-r");
        }
        arguments.extend(["-c", "read 0 512", text(&self.image)]);
        outcome(Command::new("qemu-io").args(arguments))
    }

    /// qemu-img, as one that reads and as one that writes.
    fn qemu_img(&self, user: User) -> Result<(), String> {
        let format = name(self.format);
        let image = text(&self.image);
        let mut command = Command::new("qemu-img");
        match user {
            Reader => command.args(["info", "-f", format, image]),
            Writer => command.args(["resize", "-q", "-f", format, image, "+1M"]),
        };
        outcome(&mut command)
    }
}

/// What a tool says where it was kept out.
fn outcome(command: &mut Command) -> Result<(), String> {
    let output = command.output().unwrap();
    if output.status.success() {
        return Ok(());
    }
    Err(String::from_utf8_lossy(&output.stderr).into_owned())
}

#[track_caller]
fn assert_kept_out(result: Result<(), String>, may: bool, what: &str) {
    match result {
        Ok(()) => assert!(may, "{what}: was let in"),
        Err(message) => {
            assert!(!may, "{what}: {message}");
            assert!(message.contains("lock"), "{what}: {message}");
        }
    }
}
#[test]
fn qemu_is_let_in_beside_us_as_readers_share_and_writers_are_alone() {
    for format in [Format::Raw, Format::Qcow2] {
        let scene = Scene::new(format);
        for (ours, spec) in scene.ours() {
            let disk = TestDisk::open(&spec);
            for theirs in [Reader, Writer] {
                let what = format!("{format:?}: {theirs:?} beside our {ours:?} of {spec:?}");
                let may = may_share(format, ours, theirs);
                assert_kept_out(scene.qemu_io(theirs), may, &what);
                // Its qemu-img opens an image to look at it without write permission, so ours must let it.
                assert_kept_out(scene.qemu_img(theirs), may, &what);
            }
            disk.close();
            // What was refused beside us is done once we are gone.
            scene.qemu_io(Writer).unwrap();
        }
    }
}

#[test]
fn we_are_let_in_beside_qemu_as_readers_share_and_writers_are_alone() {
    for format in [Format::Raw, Format::Qcow2] {
        let scene = Scene::new(format);
        for theirs in [Reader, Writer] {
            for below in [false, true] {
                // Made before, as qemu-img itself must be let in for that.
                let overlay = scene.overlay();
                // As the top of its chain, or below an overlay, which QEMU shares as a reader whatever it does to the overlay.
                let (image, makes) = match below {
                    false => (&scene.image, theirs),
                    true => (&overlay.top.path, Reader),
                };
                let opened = if below { "qcow2" } else { name(format) };
                let qemu = Qemu::start(opened, image, theirs);
                for (ours, spec) in scene.ours() {
                    if below && spec == overlay {
                        // That is the overlay itself, which we would write.
                        assert!(refusal(&spec).contains("in use by another process"));
                        continue;
                    }
                    let what = format!(
                        "{format:?}: our {ours:?} of {spec:?} beside its {theirs:?} below {below}"
                    );
                    match Disk::open(&spec) {
                        Ok(disk) => {
                            assert!(may_share(format, ours, makes), "{what}: was let in");
                            disk.close().unwrap();
                        }
                        Err(error) => {
                            assert!(!may_share(format, ours, makes), "{what}: {error}");
                            let message = error.to_string();
                            let wanted = match makes {
                                Reader => "in use by another process",
                                Writer => "another process",
                            };
                            assert!(message.contains(wanted), "{what}: {message}");
                        }
                    }
                }
                qemu.end();
                TestDisk::open(&scene.spec(Writer)).close();
            }
        }
    }
}

#[test]
fn a_qemu_that_is_killed_leaves_no_lock() {
    let scene = Scene::new(Format::Qcow2);
    let mut qemu = Qemu::start("qcow2", &scene.image, Writer);
    assert!(refusal(&scene.spec(Writer)).contains("another process"));
    qemu.child.kill().unwrap();
    qemu.child.wait().unwrap();
    TestDisk::open(&scene.spec(Writer)).close();
}

#[test]
fn jobs_keep_out_of_an_image_that_qemu_writes() {
    let scene = Scene::new(Format::Qcow2);
    let qemu = Qemu::start("qcow2", &scene.image, Writer);
    assert!(image::info(&scene.image, Format::Qcow2).is_err());
    assert!(image::check(&scene.image, Format::Qcow2).is_err());
    let grow = image::resize(&scene.spec(Writer), 2 << 20, image::Shrink::Refuse);
    assert!(grow.is_err());
    qemu.end();
    image::info(&scene.image, Format::Qcow2).unwrap();
    image::resize(&scene.spec(Writer), 2 << 20, image::Shrink::Refuse).unwrap();
}
