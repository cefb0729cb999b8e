//! The binary as whoever starts it sees it: exit codes, one line on standard error, nothing left behind.

#[allow(dead_code, reason = "each test binary uses its part")]
mod support;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use support::{Code, PATIENCE, kvm_or_skip, pvh_kernel};

fn run(directory: &Path, definition: &str) -> Output {
    std::fs::write(directory.join("vm.yaml"), definition).expect("a temporary file");
    Command::new(env!("CARGO_BIN_EXE_drover-vmm"))
        .current_dir(directory)
        .args(["--config", "vm.yaml", "--api-socket", "api.sock"])
        .output()
        .expect("the binary starts")
}

fn definition(directory: &Path, code: Code) -> String {
    std::fs::write(directory.join("kernel"), pvh_kernel(&code.bytes())).expect("a temporary file");
    "name: tiny\nmemory: {size: 32MiB}\nboot: {kernel: kernel}\nserial: {mode: stdio}\n".to_owned()
}

fn left_behind(directory: &Path) -> Vec<String> {
    std::fs::read_dir(directory)
        .expect("a temporary directory")
        .map(|entry| {
            entry
                .expect("an entry")
                .file_name()
                .to_string_lossy()
                .into_owned()
        })
        .filter(|name| name != "vm.yaml" && name != "kernel")
        .collect()
}

#[test]
fn a_guest_that_powers_off_ends_the_process_with_0_and_leaves_no_socket() {
    if !kvm_or_skip() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let text = definition(directory.path(), Code::new().print("hello\n").power_off());
    let output = run(directory.path(), &text);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert_eq!(output.stdout, b"hello\n");
    assert!(output.stderr.is_empty(), "{output:?}");
    assert!(left_behind(directory.path()).is_empty());
}

#[test]
fn a_crash_of_the_virtual_machine_ends_the_process_with_3() {
    if !kvm_or_skip() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let nowhere = Code::new().raw(&[0xb8, 0x00, 0x00, 0x00, 0xd0, 0xff, 0xe0]);
    let text = definition(directory.path(), nowhere);
    assert_eq!(run(directory.path(), &text).status.code(), Some(3));
    assert!(left_behind(directory.path()).is_empty());
}

#[test]
fn a_definition_that_nests_without_end_does_not_overflow_the_apis_stack() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("api.sock");
    let mut process = Command::new(env!("CARGO_BIN_EXE_drover-vmm"))
        .arg("--api-socket")
        .arg(&socket)
        .spawn()
        .expect("the binary starts");
    let deadline = Instant::now() + PATIENCE;
    while UnixStream::connect(&socket).is_err() {
        assert!(Instant::now() < deadline, "no API");
        std::thread::sleep(Duration::from_millis(5));
    }
    let bodies = [
        r#"{"a":"#.repeat(100_000),
        format!("{}1{}", r#"{"a":"#.repeat(63), "}".repeat(63)),
        "- ".repeat(60),
    ];
    for body in bodies {
        let mut stream = UnixStream::connect(&socket).expect("the process lives");
        write!(
            stream,
            "PUT /v1/vm HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/yaml\r\n\
             content-length: {}\r\n\r\n{body}",
            body.len()
        )
        .unwrap();
        let mut reply = String::new();
        stream.read_to_string(&mut reply).unwrap();
        assert!(reply.starts_with("HTTP/1.1 400"), "{reply}");
    }
    assert_eq!(process.try_wait().unwrap(), None);
    process.kill().unwrap();
    process.wait().unwrap();
}

#[test]
fn bad_input_is_one_line_with_file_and_field_and_exit_code_2() {
    let directory = tempfile::tempdir().unwrap();
    let good = definition(directory.path(), Code::new().halt());
    let disk = "disks: [{id: root, path: missing.qcow2, format: qcow2}]\n";
    let cases = [
        ("memroy: {}\n", "vm.yaml: memroy: unknown field"),
        (disk, "vm.yaml: disks[0]"),
        ("cpus: {count: 65}\n", "vm.yaml: cpus.count"),
        (
            "nets: [{id: eth0, tap: {name: no-such-tap}}]\n",
            "vm.yaml: nets[0].tap",
        ),
    ];
    for (extra, beginning) in cases {
        let output = run(directory.path(), &format!("{good}{extra}"));
        let message = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{message}");
        assert!(
            message.starts_with(&format!("drover-vmm: {beginning}")),
            "{message:?} does not begin with {beginning:?}"
        );
        assert_eq!(message.lines().count(), 1, "{message}");
        assert_eq!(
            left_behind(directory.path()),
            Vec::<String>::new(),
            "after {extra:?}"
        );
    }
}
