//! Bad input: one line that names file and field, exit status 2, nothing left behind.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};

use crate::ensure;
use crate::failure::{Context as _, Result};
use crate::fixtures::command::{Answer, succeed};
use crate::fixtures::guest::SmallGuest;
use crate::fixtures::net::Tap;
use crate::fixtures::vm::{Vm, small_guest, wait_child};
use crate::stories::{Scene, Story};

pub(super) static STORIES: &[Story] = &[
    Story::small(
        "bad_input",
        "a_definition_with_a_mistake_is_refused_by_field",
        mistakes,
    )
    .seconds(5, 120),
    Story::small(
        "bad_input",
        "an_image_that_is_not_what_is_stated_is_refused",
        images,
    )
    .seconds(10, 120),
    Story::small(
        "bad_input",
        "more_memory_than_the_host_has_needs_to_be_asked_for",
        memory,
    )
    .seconds(20, 200),
    Story::small(
        "bad_input",
        "a_socket_or_tap_or_image_in_use_is_not_taken",
        in_use,
    )
    .seconds(30, 200),
    Story::small(
        "bad_input",
        "without_dev_kvm_the_message_says_what_to_do",
        kvm,
    )
    .seconds(5, 120),
];

/// Runs `drover-vmm` on a definition that it must refuse.
fn refused(scene: &Scene, text: &str, user: Option<&str>) -> Result<Answer> {
    let file = scene.folder.join("bad.yaml");
    fs::write(&file, text).context("write bad.yaml")?;
    let socket = scene.folder.join("bad-api.sock");
    let program = scene.site.program("drover-vmm");
    let mut command = match user {
        None => Command::new(&program),
        Some(user) => {
            let mut command = Command::new("setpriv");
            command
                .args(["--reuid", user, "--regid", user, "--clear-groups"])
                .arg(&program);
            command
        }
    };
    let mut child = command
        .arg("--api-socket")
        .arg(&socket)
        .arg("--config")
        .arg(&file)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .context("start drover-vmm")?;
    let status = wait_child(&mut child, Duration::from_secs(30))?;
    if status.is_none() {
        child.kill()?;
    }
    let output = child.wait_with_output()?;
    let answer = Answer {
        status: status.unwrap_or(-1),
        stdout: String::new(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    };
    ensure!(
        status.is_some(),
        "drover-vmm runs on with {text}: {}",
        answer.stderr
    );
    ensure!(
        !socket.exists(),
        "drover-vmm left its socket behind after {text}"
    );
    Ok(answer)
}

/// The message is one line that holds all of `words`, and the exit status is 2.
fn says(answer: &Answer, words: &[&str]) -> Result {
    let message = answer.stderr.trim();
    ensure!(
        answer.status == 2,
        "exit status {} with {message:?}",
        answer.status
    );
    ensure!(
        message.lines().count() == 1,
        "more than one line: {message:?}"
    );
    for word in words {
        ensure!(
            message.contains(word),
            "the message names no {word:?}: {message:?}"
        );
    }
    Ok(())
}

fn refuse(scene: &Scene, definition: &Value, words: &[&str]) -> Result {
    let answer = refused(scene, &serde_json::to_string_pretty(definition)?, None)?;
    says(&answer, words).context(&format!("with {definition}"))
}

/// A definition that would start; its console goes nowhere, so that nothing else could be left behind.
fn sound(scene: &Scene) -> Value {
    let guest = SmallGuest::plain(&scene.site.images);
    let mut definition = small_guest(&guest, &scene.folder);
    definition["serial"] = json!({"mode": "none"});
    definition
}

fn mistakes(scene: &Scene) -> Result {
    let mut unknown = sound(scene);
    unknown["memory"]["sise"] = json!("1GiB");
    refuse(scene, &unknown, &["bad.yaml", "memory.sise"])?;
    let mut none = sound(scene);
    none["cpus"]["count"] = json!(0);
    refuse(scene, &none, &["bad.yaml", "cpus.count"])?;
    let mut missing = sound(scene);
    missing["boot"]["kernel"] = json!("/no/such/kernel");
    refuse(scene, &missing, &["boot.kernel", "/no/such/kernel"])?;
    let mut no_kernel = sound(scene);
    no_kernel["boot"]["kernel"] = json!(scene.site.image("guest-initrd"));
    refuse(scene, &no_kernel, &["boot.kernel", "guest-initrd"])?;
    let answer = refused(scene, "name: [unclosed", None)?;
    says(&answer, &["bad.yaml"])
}

fn disk(path: &Path, format: &str) -> Value {
    json!({"id": "root", "path": path, "format": format})
}

fn images(scene: &Scene) -> Result {
    let folder = &scene.folder;
    let text = |path: &Path| path.to_string_lossy().into_owned();
    let with = |disk: Value| {
        let mut definition = sound(scene);
        definition["disks"] = json!([disk]);
        definition
    };
    let absent = folder.join("absent.qcow2");
    refuse(
        scene,
        &with(disk(&absent, "qcow2")),
        &["disks[0]", "absent.qcow2"],
    )?;

    let raw = folder.join("plain.img");
    succeed(
        "qemu-img",
        &["create", "-q", "-f", "raw", &text(&raw), "16M"],
    )?;
    refuse(
        scene,
        &with(disk(&raw, "qcow2")),
        &["disks[0]", "plain.img"],
    )?;

    let (base, top) = (folder.join("base.qcow2"), folder.join("top.qcow2"));
    succeed(
        "qemu-img",
        &["create", "-q", "-f", "qcow2", &text(&base), "16M"],
    )?;
    succeed(
        "qemu-img",
        &[
            "create",
            "-q",
            "-f",
            "qcow2",
            "-b",
            &text(&base),
            "-F",
            "qcow2",
            &text(&top),
        ],
    )?;
    // The header names a file; nobody said that it may be opened.
    refuse(
        scene,
        &with(disk(&top, "qcow2")),
        &["disks[0]", "top.qcow2", "backing"],
    )?;
    let mut other_base = disk(&top, "qcow2");
    other_base["backing"] = json!([{"path": raw, "format": "qcow2"}]);
    refuse(scene, &with(other_base), &["disks[0]", "plain.img"])
}

fn memory(scene: &Scene) -> Result {
    let mut definition = sound(scene);
    definition["memory"] = json!({"size": "64GiB"});
    refuse(scene, &definition, &["memory.size", "overcommit"])?;
    // Asked for, it starts: nothing is touched before the guest does.
    let guest = SmallGuest::prepare(scene)?;
    let mut definition = small_guest(&guest, &scene.folder);
    definition["memory"] = json!({"size": "8GiB", "overcommit": true});
    Vm::boot(scene, &definition)?.power_off()
}

fn in_use(scene: &Scene) -> Result {
    let guest = SmallGuest::prepare(scene)?;
    let top = scene.folder.join("top.qcow2");
    succeed(
        "qemu-img",
        &["create", "-q", "-f", "qcow2", &top.to_string_lossy(), "64M"],
    )?;
    let _tap = Tap::create("story0", "10.77.0.1/24", 1500, 1)?;
    let mut definition = small_guest(&guest, &scene.folder);
    definition["disks"] = json!([disk(&top, "qcow2")]);
    definition["nets"] = json!([{"id": "eth0", "tap": {"name": "story0"}}]);
    let vm = Vm::boot(scene, &definition)?;

    let mut same_image = sound(scene);
    same_image["disks"] = json!([disk(&top, "qcow2")]);
    refuse(scene, &same_image, &["disks[0]", "top.qcow2"])?;
    let mut same_tap = sound(scene);
    same_tap["nets"] = json!([{"id": "eth0", "tap": {"name": "story0"}}]);
    refuse(scene, &same_tap, &["nets[0]", "story0"])?;

    let file = scene.folder.join("second.yaml");
    fs::write(&file, sound(scene).to_string())?;
    let answer = crate::fixtures::command::ask(
        scene.site.program("drover-vmm"),
        &[
            "--api-socket",
            &vm.api_socket.to_string_lossy(),
            "--config",
            &file.to_string_lossy(),
        ],
    )?;
    says(&answer, &["api.sock"])?;
    // The first one still answers.
    let info = vm.api("GET", "/v1/info", None)?;
    ensure!(
        info.status == 200,
        "the VM whose socket was asked for: {}",
        info.status
    );
    vm.power_off()
}

/// Hides a file of /dev while the value lives.
struct Hidden(&'static str);

impl Hidden {
    fn new(path: &'static str) -> Result<Self> {
        fs::rename(path, format!("{path}.hidden")).context(path)?;
        Ok(Self(path))
    }
}

impl Drop for Hidden {
    fn drop(&mut self) {
        // Later stories would say so at once.
        let _ = fs::rename(format!("{}.hidden", self.0), self.0);
    }
}

fn kvm(scene: &Scene) -> Result {
    if !scene.site.emulated() {
        return Err(crate::failure::Failure::Skip(
            "hides /dev/kvm: only on a host of its own".into(),
        ));
    }
    let definition = sound(scene).to_string();
    {
        let _hidden = Hidden::new("/dev/kvm")?;
        says(
            &refused(scene, &definition, None)?,
            &["/dev/kvm", "modprobe"],
        )?;
    }
    // As a user who may do nothing: the folder is theirs, the device is not.
    succeed("chown", &["65534:65534", &scene.folder.to_string_lossy()])?;
    let answer = refused(scene, &definition, Some("65534"))?;
    says(&answer, &["/dev/kvm", "group"])
}
