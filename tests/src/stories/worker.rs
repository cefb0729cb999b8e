//! The main job: a Debian worker from one definition, joined, and gone without a trace.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::ensure;
use crate::failure::{Context as _, Failure, Result};
use crate::fixtures::command::{ask, succeed};
use crate::fixtures::console::Console;
use crate::fixtures::net::Bridge;
use crate::stories::{Scene, Story};

pub(super) static STORIES: &[Story] = &[
    Story::small(
        "worker",
        "a_debian_worker_joins_and_is_deleted_without_a_trace",
        joins,
    )
    .seconds(180, 600)
    .memory(1024),
    Story::small(
        "worker",
        "a_worker_definition_with_a_mistake_leaves_nothing",
        mistakes,
    )
    .seconds(5, 120),
    Story::small(
        "worker",
        "overlay_and_seed_take_few_system_calls_and_bytes",
        provisioning_costs,
    )
    .seconds(5, 120),
];

/// The bridge that the worker is on.
pub const BRIDGE: &str = "storybr0";
/// The worker's name.
pub const NAME: &str = "worker-07";

/// What the demo and the story make: a 4 GiB worker on a 2 GiB base.
#[must_use]
pub fn definition(scene: &Scene) -> Value {
    json!({
        "base": {"path": scene.site.image("base.qcow2"), "format": "qcow2"},
        "boot": {
            "kernel": scene.site.image("worker-vmlinuz"),
            "initrd": scene.site.image("worker-initrd"),
            "cmdline": "root=LABEL=root ro console=ttyS0",
        },
        "disk": {"size": "4GiB"},
        "cpus": {"count": 1},
        "memory": {"size": "1GiB"},
        "network": {
            "bridge": BRIDGE,
            "address": {"addresses": ["10.78.0.7/24"], "gateway": "10.78.0.1"},
        },
        "hostname": NAME,
        "ssh_authorized_keys": [
            "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIEV4YW1wbGVLZXlFeGFtcGxlS2V5RXhhbXBsZUtleUV4YW1w ops@lab",
        ],
        "user_data": {
            "write_files": [{"path": "/etc/story", "content": "from the seed\n"}],
            "runcmd": [
                "{ echo STORY host=$(hostname) file=$(cat /etc/story); echo STORY root=$(df -k / | awk 'END{print $2}'); \
                 echo STORY containerd=$(systemctl is-active containerd) mode=$(stat -c %a /etc/kubeadm/join.yaml); \
                 ping -c 3 -W 5 10.78.0.1 > /dev/null && echo STORY network=up; } > /dev/ttyS0",
            ],
        },
        "join": {
            "api_version": "kubeadm.k8s.io/v1beta4",
            "control_plane_endpoint": "10.78.0.1:6443",
            "token": "abcdef.0123456789abcdef",
            "ca_cert_hashes": ["sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"],
            "node_labels": {"pool": "general"},
        },
    })
}

/// `drover` on a state folder of the story's own.
fn drover(scene: &Scene, state: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(scene.site.program("drover"));
    command
        .arg("--state-dir")
        .arg(state)
        .args(arguments)
        .env("DROVER_VMM", scene.site.program("drover-vmm"))
        .stdin(Stdio::null());
    command
}

fn joins(scene: &Scene) -> Result {
    let _bridge = Bridge::create(BRIDGE, "10.78.0.1/24")?;
    let state = scene.folder.join("state");
    let file = scene.folder.join("worker.yaml");
    fs::write(&file, definition(scene).to_string()).context("write worker.yaml")?;
    let file = file.to_string_lossy();
    let created = drover(
        scene,
        &state,
        &[
            "--output", "json", "worker", "create", NAME, "-f", &file, "--wait", "joined",
        ],
    )
    .output()
    .context("drover worker create")?;
    let stderr = String::from_utf8_lossy(&created.stderr);
    let worker = state.join("workers").join(NAME);
    ensure!(
        created.status.success(),
        "drover worker create: {} {stderr}{}",
        created.status,
        fs::read_to_string(worker.join("vmm.log")).unwrap_or_default()
    );
    println!("{}", String::from_utf8_lossy(&created.stdout));
    let timeline: Value =
        serde_json::from_slice(&created.stdout).context("the JSON of drover worker create")?;
    ensure!(
        timeline.to_string().contains("\"joined\""),
        "the timeline knows no join: {timeline}"
    );

    let mut console = Console::connect(
        &worker.join("console.sock"),
        &scene.folder.join("worker-console.log"),
    )?;
    let soon = Duration::from_secs(5);
    console.wait_for("STORY host=worker-07 file=from the seed", soon)?;
    console.wait_for("STORY root=", soon)?;
    let root: u64 = console
        .wait_for("\n", soon)?
        .trim()
        .parse()
        .context("the root's size")?;
    ensure!(
        root > 3_800_000,
        "the root has {root} KiB, not nearly 4 GiB"
    );
    console.wait_for("STORY containerd=active mode=600", soon)?;
    console.wait_for("STORY network=up", soon)?;
    console.wait_for(
        "JOINED node=worker-07 endpoint=10.78.0.1:6443 api=v1beta4",
        soon,
    )?;
    drop(console);

    let list = drover(scene, &state, &["worker", "list", "--output", "json"]).output()?;
    ensure!(
        String::from_utf8_lossy(&list.stdout).contains(NAME),
        "the worker is not listed"
    );
    secrets_are_kept(&worker)?;

    let vmm = vmm_process(&state)?;
    let started = Instant::now();
    let deleted = drover(scene, &state, &["worker", "delete", NAME]).output()?;
    println!("deleted after {:.1} s", started.elapsed().as_secs_f64());
    ensure!(
        deleted.status.success(),
        "drover worker delete: {}",
        String::from_utf8_lossy(&deleted.stderr)
    );
    let log = String::from_utf8_lossy(&deleted.stdout);
    ensure!(
        !log.contains("forced"),
        "the worker did not shut down by itself: {log}"
    );
    without_a_trace(&state, vmm)
}

/// Nobody but the owner can read what holds the token.
fn secrets_are_kept(worker: &Path) -> Result {
    use std::os::unix::fs::PermissionsExt as _;
    for name in ["seed.iso", "vm.yaml", "overlay.qcow2"] {
        let mode = fs::metadata(worker.join(name))
            .context(name)?
            .permissions()
            .mode()
            & 0o777;
        ensure!(mode == 0o600, "{name} has mode {mode:o}");
    }
    let log = fs::read_to_string(worker.join("vmm.log")).unwrap_or_default();
    ensure!(
        !log.contains("abcdef.0123456789abcdef"),
        "the log holds the join token"
    );
    Ok(())
}

/// The process id of the worker's VMM.
///
/// # Errors
///
/// The worker keeps none.
pub fn vmm_process(state: &Path) -> Result<u32> {
    let file = state.join("workers").join(NAME).join("vmm.pid");
    let text = fs::read_to_string(&file).context("vmm.pid")?;
    text.split_whitespace()
        .next()
        .unwrap_or_default()
        .parse()
        .context("vmm.pid")
}

/// Whether a deleted worker has left anything.
///
/// # Errors
///
/// It has.
pub fn without_a_trace(state: &Path, vmm: u32) -> Result {
    ensure!(
        !Path::new(&format!("/proc/{vmm}")).exists(),
        "drover-vmm {vmm} still runs"
    );
    let left: Vec<String> = walk(&state.join("workers"));
    ensure!(left.is_empty(), "files are left: {left:?}");
    let ports = succeed("ip", &["-o", "link", "show", "master", BRIDGE])?;
    ensure!(ports.trim().is_empty(), "taps are left: {ports}");
    Ok(())
}

fn walk(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .map(|entry| entry.path().display().to_string())
        .collect()
}

fn mistakes(scene: &Scene) -> Result {
    let state = scene.folder.join("state");
    let try_one = |change: &dyn Fn(&mut Value), words: &[&str]| -> Result {
        let mut definition = definition(scene);
        definition["network"] = Value::Null;
        change(&mut definition);
        let file = scene.folder.join("worker.yaml");
        fs::write(&file, definition.to_string())?;
        let output = drover(
            scene,
            &state,
            &[
                "worker",
                "create",
                NAME,
                "-f",
                &file.to_string_lossy(),
                "--no-start",
            ],
        )
        .output()?;
        let message = String::from_utf8_lossy(&output.stderr);
        ensure!(
            output.status.code() == Some(2),
            "exit {} with {message:?}",
            output.status
        );
        ensure!(
            message.trim().lines().count() == 1,
            "not one line: {message:?}"
        );
        for word in words {
            ensure!(message.contains(word), "no {word:?} in {message:?}");
        }
        let left = walk(&state.join("workers"));
        ensure!(left.is_empty(), "left behind: {left:?}");
        Ok(())
    };
    try_one(
        &|definition| definition["base"]["path"] = json!("/no/base.qcow2"),
        &["base.path", "/no/base.qcow2"],
    )?;
    try_one(
        &|definition| definition["base"]["format"] = json!("raw"),
        &["base.format", "base.qcow2"],
    )?;
    try_one(
        &|definition| definition["disk"]["size"] = json!("1GiB"),
        &["disk.size"],
    )?;
    try_one(
        &|definition| definition["user_data"] = json!("a: [b"),
        &["user_data"],
    )?;
    try_one(
        &|definition| definition["join"]["token"] = json!("short"),
        &["join.token"],
    )?;
    let other = ask(scene.site.program("drover"), &["worker", "create"])?;
    ensure!(
        other.status == 2,
        "a command line with too little ends with {}",
        other.status
    );
    Ok(())
}

/// Times mean little on an emulated processor; these counts do not drift.
fn provisioning_costs(scene: &Scene) -> Result {
    const CALLS: usize = 450;
    const BYTES: u64 = 96 << 10;
    let state = scene.folder.join("state");
    let mut definition = definition(scene);
    definition["network"] = Value::Null;
    let file = scene.folder.join("worker.yaml");
    fs::write(&file, definition.to_string())?;
    let trace = scene.folder.join("trace");
    let output = Command::new("strace")
        .args(["-f", "-qq", "-s", "0", "-o"])
        .arg(&trace)
        .arg(scene.site.program("drover"))
        .arg("--state-dir")
        .arg(&state)
        .args(["worker", "create", NAME, "--no-start", "-f"])
        .arg(&file)
        .stdin(Stdio::null())
        .output();
    let output = match output {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return Err(Failure::Skip("strace is not installed".into()));
        }
        output => output.context("start strace")?,
    };
    ensure!(
        output.status.success(),
        "drover worker create: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    let trace = fs::read_to_string(&trace).context("strace's output")?;
    let (calls, bytes) = count_calls(&trace);
    println!("{calls} system calls, {bytes} bytes written");
    ensure!(bytes > 0, "strace saw nothing being written");
    ensure!(
        calls <= CALLS,
        "a worker's overlay and seed took {calls} system calls, more than {CALLS}"
    );
    ensure!(
        bytes <= BYTES,
        "a worker's overlay and seed took {bytes} bytes written, more than {BYTES}"
    );
    Ok(())
}

/// System calls in a trace of `strace -f`, and the bytes that those which write have written.
fn count_calls(trace: &str) -> (usize, u64) {
    let mut calls = 0;
    let mut bytes = 0;
    for line in trace.lines() {
        // "1234 write(4, ""..., 12) = 12", or in two pieces: "… <unfinished ...>", "1234 <... write resumed>) = 12".
        let call = line
            .split_once(char::is_whitespace)
            .map_or("", |(_, call)| call.trim_start());
        let resumed = call.strip_prefix("<... ");
        if resumed.is_none() && call.starts_with(|c: char| c.is_ascii_lowercase()) {
            calls += 1;
        }
        let name = resumed.unwrap_or(call);
        let writes = [
            "write(",
            "write resumed",
            "pwrite",
            "writev",
            "copy_file_range",
            "sendfile",
        ];
        if writes.iter().any(|write| name.starts_with(write)) {
            let result = call
                .rsplit_once(" = ")
                .and_then(|(_, result)| result.trim().parse::<u64>().ok());
            bytes += result.unwrap_or(0);
        }
    }
    (calls, bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_counted_once_even_if_their_end_stands_on_a_line_of_its_own() {
        let trace = "7 openat(AT_FDCWD, \"x\"..., O_RDONLY) = 3\n8 pwrite64(4, \"\"..., 8, 0 <unfinished ...>\n\
                     7 write(5, \"\"..., 100) = 100\n8 <... pwrite64 resumed>) = 8\n8 write(4, \"\"..., 9) = -1 ENOSPC (No space)\n";
        assert_eq!(count_calls(trace), (4, 108));
    }
}
