//! Bad input: one line that names the field and the file, exit code 2, nothing left behind.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tempfile::TempDir;

/// A folder with a base image, a kernel, a sound definition, and nothing of a worker yet.
struct Scene {
    folder: TempDir,
}

impl Scene {
    fn new() -> Self {
        let scene = Self {
            folder: tempfile::tempdir().unwrap(),
        };
        fs::write(scene.path("kernel"), b"not looked at").unwrap();
        scene.image(&["create", "base.qcow2", "1GiB", "--format", "qcow2"]);
        scene
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn drover(&self, arguments: &[&str]) -> Output {
        self.drover_with_vmm(arguments, Path::new("/bin/true"))
    }

    fn drover_with_vmm(&self, arguments: &[&str], vmm: &Path) -> Output {
        Command::new(env!("CARGO_BIN_EXE_drover"))
            .args(arguments)
            .current_dir(self.folder.path())
            .env("DROVER_VMM", vmm)
            .env_remove("XDG_STATE_HOME")
            .output()
            .unwrap()
    }

    fn image(&self, arguments: &[&str]) {
        let output = self.drover(&[&["image"], arguments].concat());
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
    }

    fn definition(&self, change: impl Fn(String) -> String) {
        let sound = "base: {path: base.qcow2, format: qcow2}\nboot: {kernel: kernel}\n\
            disk: {size: 2GiB}\nmemory: {size: 256MiB}\n";
        fs::write(self.path("worker.yaml"), change(sound.to_owned())).unwrap();
    }

    fn create(&self) -> Output {
        self.drover(&[
            "worker",
            "create",
            "w1",
            "-f",
            "worker.yaml",
            "--state-dir",
            "state",
        ])
    }

    /// Asserts that a command failed as bad input with exactly this line, and that no worker is there.
    fn refused(&self, output: &Output, line: &str) {
        let error = String::from_utf8_lossy(&output.stderr);
        let expected = line.replace("DIR", self.folder.path().to_str().unwrap());
        assert_eq!(error.trim_end(), format!("drover: {expected}"));
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(output.stdout.is_empty());
        self.nothing_left();
    }

    fn nothing_left(&self) {
        let workers = self.path("state/workers");
        if let Ok(entries) = fs::read_dir(workers) {
            let left: Vec<_> = entries.map(|entry| entry.unwrap().file_name()).collect();
            assert!(left.is_empty(), "{left:?}");
        }
    }
}

#[test]
fn definitions_that_cannot_work_are_refused_by_field() {
    let cases = [
        (
            "memory: {size: 256MiB}",
            "memory: {size: 256MiB}\nmemroy: {}",
            "worker.yaml: memroy: unknown field \"memroy\"",
        ),
        ("size: 256MiB", "size: 256", "worker.yaml: memory.size: "),
        (
            "base.qcow2",
            "none.qcow2",
            "worker.yaml: base.path: DIR/none.qcow2: cannot be read: No such file or directory",
        ),
        (
            "format: qcow2",
            "format: raw",
            "worker.yaml: base.format: DIR/base.qcow2: is a qcow2 image, not a raw one",
        ),
        (
            "path: base.qcow2",
            "path: kernel",
            "worker.yaml: base.format: DIR/kernel: is not a qcow2 image",
        ),
        (
            "kernel: kernel",
            "kernel: none",
            "worker.yaml: boot.kernel: DIR/none: cannot be read: No such file or directory",
        ),
        (
            "disk: {size: 2GiB}",
            "disk: {size: 512MiB}",
            "worker.yaml: disk.size: 512MiB is smaller than the base, which has 1GiB",
        ),
        (
            "disk:",
            "network: {bridge: drv-none}\ndisk:",
            "worker.yaml: network.bridge: drv-none is not a bridge of this host",
        ),
        (
            "disk:",
            "user_data: 'a: ['\ndisk:",
            "worker.yaml: user_data: not YAML: ",
        ),
        (
            "disk:",
            "user_data_file: kernel\ndisk:",
            "worker.yaml: user_data_file: not a mapping",
        ),
        (
            "disk:",
            "user_data_file: none\ndisk:",
            "worker.yaml: user_data_file: none: cannot be read: No such file or directory",
        ),
        (
            "disk:",
            "name: w2\ndisk:",
            "worker.yaml: name: is \"w2\", but the worker is to be called \"w1\"",
        ),
        ("disk:", "disk: [\n", "worker.yaml: "),
    ];
    let scene = Scene::new();
    for (from, to, expected) in cases {
        scene.definition(|text| text.replacen(from, to, 1));
        let output = scene.create();
        let error = String::from_utf8_lossy(&output.stderr);
        let expected = format!(
            "drover: {}",
            expected.replace("DIR", scene.folder.path().to_str().unwrap())
        );
        assert!(error.starts_with(&expected), "{error}\n{expected}");
        assert_eq!(error.trim_end().lines().count(), 1, "{error}");
        assert_eq!(output.status.code(), Some(2), "{error}");
        scene.nothing_left();
    }
}

#[test]
fn a_backing_file_named_only_by_a_header_is_refused() {
    let scene = Scene::new();
    scene.image(&[
        "create",
        "top.qcow2",
        "1GiB",
        "--format",
        "qcow2",
        "--backing",
        "base.qcow2",
        "--backing-format",
        "qcow2",
    ]);
    scene.definition(|text| text.replace("base.qcow2", "top.qcow2"));
    scene.refused(
        &scene.create(),
        "worker.yaml: base.path: DIR/top.qcow2: its header names the backing file \"base.qcow2\", which is not opened without permission: list it under base.backing",
    );
}

#[test]
fn a_missing_definition_and_an_impossible_name_are_refused() {
    let scene = Scene::new();
    scene.refused(
        &scene.create(),
        "worker.yaml: cannot be read: No such file or directory (os error 2)",
    );
    scene.definition(|text| text);
    scene.refused(
        &scene.drover(&["worker", "create", "No_Name", "-f", "worker.yaml", "--state-dir", "state"]),
        "\"No_Name\" is not a worker's name: expected a DNS label (a-z, 0-9, '-', at most 63 characters)",
    );
    scene.refused(
        &scene.drover(&["worker", "show", "w1", "--state-dir", "state"]),
        "there is no worker w1 in DIR/state",
    );
    scene.refused(
        &scene.drover(&["worker", "console", "w1", "--state-dir", "state"]),
        "there is no worker w1 in DIR/state",
    );
}

/// A program in place of the VMM.
fn program(scene: &Scene, text: &str) -> PathBuf {
    use std::os::unix::fs::PermissionsExt;

    let path = scene.path("vmm");
    fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path
}

#[test]
fn a_vmm_that_refuses_is_quoted_and_undone() {
    let scene = Scene::new();
    scene.definition(|text| text);
    let arguments = [
        "worker",
        "create",
        "w1",
        "-f",
        "worker.yaml",
        "--state-dir",
        "state",
    ];
    let vmm = program(
        &scene,
        "echo starting >&2; echo 'drover-vmm: /dev/kvm: no permission' >&2; exit 2",
    );
    scene.refused(
        &scene.drover_with_vmm(&arguments, &vmm),
        "drover-vmm: /dev/kvm: no permission",
    );

    let vmm = program(&scene, "exit 9");
    let output = scene.drover_with_vmm(&arguments, &vmm);
    assert_eq!(output.status.code(), Some(1));
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(
        error,
        "drover: drover-vmm: ended with exit status: 9 and said nothing\n"
    );
    scene.nothing_left();

    let output = scene.drover_with_vmm(&arguments, &scene.path("missing"));
    assert_eq!(output.status.code(), Some(1));
    scene.nothing_left();
}

#[test]
fn a_worker_is_made_once_listed_and_deleted_without_a_trace() {
    use std::os::unix::fs::PermissionsExt;

    let scene = Scene::new();
    scene.definition(|text| format!("{text}user_data: {{password: hunter2}}\n"));
    let run = |arguments: &[&str]| {
        let output = scene.drover(
            &[
                &["worker"],
                arguments,
                &["--state-dir", "state", "--output", "json"],
            ]
            .concat(),
        );
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(!text.contains("hunter2"));
        (
            output.status.code(),
            serde_json::from_str::<serde_json::Value>(&text).unwrap_or_default(),
        )
    };
    let create = ["create", "w1", "-f", "worker.yaml", "--no-start"];
    let (code, made) = run(&create);
    assert_eq!(code, Some(0));
    assert_eq!(made["worker"]["name"], "w1");
    let steps: Vec<_> = made["timeline"]
        .as_array()
        .unwrap()
        .iter()
        .map(|step| step["step"].clone())
        .collect();
    assert_eq!(steps, ["overlay", "seed", "durable"]);
    for entry in fs::read_dir(scene.path("state/workers/w1")).unwrap() {
        let path = entry.unwrap().path();
        assert_eq!(
            fs::metadata(&path).unwrap().permissions().mode() & 0o777,
            0o600
        );
        let holds_secret = fs::read(&path)
            .unwrap()
            .windows(7)
            .any(|part| part == b"hunter2");
        assert_eq!(
            holds_secret,
            path.ends_with("seed.iso"),
            "{}",
            path.display()
        );
    }
    assert_eq!(
        fs::metadata(scene.path("state/workers/w1"))
            .unwrap()
            .permissions()
            .mode()
            & 0o777,
        0o700
    );

    assert_eq!(run(&create).0, Some(2), "it exists");
    let (_, listed) = run(&["list"]);
    assert_eq!(
        (&listed[0]["name"], &listed[0]["status"]),
        (&"w1".into(), &"stopped".into())
    );
    assert_eq!(run(&["console", "w1"]).0, Some(2), "it does not run");
    assert_eq!(
        run(&["delete", "w1"]),
        (Some(0), serde_json::json!({"name": "w1", "was": "stopped"}))
    );
    scene.nothing_left();
    assert_eq!(
        run(&["delete", "w1"]),
        (Some(0), serde_json::json!({"name": "w1", "was": "absent"}))
    );
}

#[test]
fn a_half_made_worker_can_be_deleted() {
    let scene = Scene::new();
    for left in [
        "state/workers/w1",
        "state/workers/.w1.new-01234567",
        "state/workers/.w1.old-01234567",
    ] {
        fs::create_dir_all(scene.path(left)).unwrap();
        fs::write(scene.path(left).join("overlay.qcow2"), b"").unwrap();
    }
    let output = scene.drover(&["worker", "delete", "w1", "--state-dir", "state"]);
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    scene.nothing_left();
}

#[test]
fn images_are_never_guessed_at() {
    let scene = Scene::new();
    let output = scene.drover(&["image", "info", "base.qcow2"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("--format"));
    let output = scene.drover(&["image", "info", "kernel", "--format", "qcow2"]);
    assert_eq!(output.status.code(), Some(2));
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(error.starts_with("drover: kernel: "), "{error}");
}

#[test]
fn an_image_is_made_grown_and_checked() {
    let scene = Scene::new();
    scene.image(&[
        "create",
        "a.qcow2",
        "2GiB",
        "--format",
        "qcow2",
        "--backing",
        "base.qcow2",
        "--backing-format",
        "qcow2",
    ]);
    scene.image(&[
        "resize",
        "a.qcow2",
        "3GiB",
        "--format",
        "qcow2",
        "--backing",
        "base.qcow2",
        "--backing-format",
        "qcow2",
    ]);
    scene.image(&["check", "a.qcow2", "--format", "qcow2"]);
    let output = scene.drover(&[
        "image", "info", "a.qcow2", "--format", "qcow2", "--output", "json",
    ]);
    let info: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(info["size_bytes"], 3_u64 << 30);

    let output = scene.drover(&[
        "image",
        "resize",
        "a.qcow2",
        "1GiB",
        "--format",
        "qcow2",
        "--backing",
        "base.qcow2",
        "--backing-format",
        "qcow2",
    ]);
    assert_eq!(output.status.code(), Some(2), "shrinking needs permission");
    let output = scene.drover(&[
        "image",
        "create",
        "b.qcow2",
        "512MiB",
        "--format",
        "qcow2",
        "--backing",
        "base.qcow2",
        "--backing-format",
        "qcow2",
    ]);
    assert_eq!(
        output.status.code(),
        Some(2),
        "smaller than its backing file"
    );
    assert!(!scene.path("b.qcow2").exists());
}
