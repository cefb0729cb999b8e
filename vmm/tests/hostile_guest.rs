//! Guests that do what no driver does, on this machine's /dev/kvm: they harm nobody but themselves.

#[allow(dead_code, reason = "each test binary uses its part")]
mod support;

use std::process::Command;

use support::{Code, kvm_or_skip, pvh_kernel};

/// Where the VMM puts the registers of the first virtio device.
const BAR0: u32 = 0xf000_0000;

/// `mov byte [address], value`
fn store8(code: Code, address: u32, value: u8) -> Code {
    let code = code.raw(&[0xc6, 0x05]).raw(&address.to_le_bytes());
    code.raw(&[value])
}

/// `mov dword [address], value`
fn store32(code: Code, address: u32, value: u32) -> Code {
    let code = code.raw(&[0xc7, 0x05]).raw(&address.to_le_bytes());
    code.raw(&value.to_le_bytes())
}

/// Writes `value` to the port dword 0xcf8 or 0xcfc.
fn config_port(code: Code, port: u16, value: u32) -> Code {
    let [low, high] = port.to_le_bytes();
    let code = code.raw(&[0xb8]).raw(&value.to_le_bytes()); // mov eax, value
    code.raw(&[0xba, low, high, 0, 0, 0xef]) // mov edx, port; out dx, eax
}

/// Lets the device at 00:01.0 decode memory and master the bus.
fn enable_first_device(code: Code) -> Code {
    let code = config_port(code, 0xcf8, 0x8000_0804);
    config_port(code, 0xcfc, 6)
}

/// Runs `body` `count` times, with a counter in RAM at 8 MiB.
fn repeat(code: Code, count: u32, body: &Code) -> Code {
    let body = body.bytes_so_far();
    let length = body.len() as i32;
    // inc dword [0x800000]; cmp dword [0x800000], count; jb back
    let back = -(length + 6 + 10 + 6);
    code.raw(body)
        .raw(&[0xff, 0x05, 0x00, 0x00, 0x80, 0x00])
        .raw(&[0x81, 0x3d, 0x00, 0x00, 0x80, 0x00])
        .raw(&count.to_le_bytes())
        .raw(&[0x0f, 0x82])
        .raw(&back.to_le_bytes())
}

#[test]
fn a_guest_that_fails_to_start_its_card_for_ever_does_not_fill_the_log() {
    if !kvm_or_skip() {
        return;
    }
    let folder = tempfile::tempdir().expect("a temporary directory");
    let start_without_queues = [(20, 0), (20, 3)]
        .into_iter()
        .fold(Code::new(), |code, (at, value)| {
            store8(code, BAR0 + at, value)
        });
    let start_without_queues = store32(start_without_queues, BAR0 + 8, 1);
    let start_without_queues = store32(start_without_queues, BAR0 + 12, 1); // VERSION_1
    let start_without_queues = [11, 15]
        .into_iter()
        .fold(start_without_queues, |code, status| {
            store8(code, BAR0 + 20, status)
        });
    let code = repeat(
        enable_first_device(Code::new()),
        2000,
        &start_without_queues,
    )
    .power_off();
    std::fs::write(folder.path().join("kernel"), pvh_kernel(&code.bytes())).unwrap();
    let tap = format!("drvh{}", std::process::id());
    let definition = format!(
        "name: hostile\nmemory: {{size: 32MiB}}\nrng: false\nboot: {{kernel: kernel}}\n\
         serial: {{mode: none}}\nnets: [{{id: eth0, tap: {{create: {tap}}}}}]\n"
    );
    std::fs::write(folder.path().join("vm.yaml"), definition).unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_drover-vmm"))
        .current_dir(folder.path())
        .args(["--config", "vm.yaml", "--log-level", "info"])
        .output()
        .expect("the binary starts");
    let log = String::from_utf8_lossy(&output.stderr);
    if output.status.code() == Some(2) && log.contains("nets[0].tap") {
        eprintln!("skipped: no tap can be made here: {log}");
        return;
    }
    assert_eq!(output.status.code(), Some(0), "{log}");
    let lines = log.matches("did not start").count();
    assert!((1..=11).contains(&lines), "{lines} lines of 2000: {log}");
}
