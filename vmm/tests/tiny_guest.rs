//! Guests of a few instructions, on this machine's /dev/kvm: how a VM starts, resets and ends.

#[allow(dead_code, reason = "each test binary uses its part")]
mod support;

use std::time::{Duration, Instant};

use drover_api::server::Created;
use drover_api::types::{ErrorCode, EventKind, StopReason, VmState};
use drover_vmm::control::Outcome;
use support::{Code, Vm, kvm_or_skip};

macro_rules! needs_kvm {
    () => {
        if !kvm_or_skip() {
            return;
        }
    };
}

#[test]
fn a_guest_that_powers_off_ends_the_vm_cleanly_and_its_last_words_are_kept() {
    needs_kvm!();
    let mut vm = Vm::running(Code::new().print("hello\n").power_off(), "");
    assert_eq!(vm.outcome(), Outcome::Clean);
    assert_eq!(vm.serial(), "hello\n");
    let stopped = EventKind::State {
        state: VmState::Stopped,
        stop_reason: Some(StopReason::PoweredOff),
    };
    assert_eq!(vm.events().last(), Some(&stopped));
}

/// Counts its boots in RAM that no kernel is loaded to, tells the count, and turns off at the third.
fn boots_three_times(again: Code) -> Code {
    let tail = again.bytes();
    Code::new()
        .raw(&[0xfe, 0x05, 0x00, 0x00, 0x80, 0x00]) // inc byte [0x800000]
        .raw(&[0xa0, 0x00, 0x00, 0x80, 0x00]) // mov al, [0x800000]
        .raw(&[0x04, b'0'])
        .out_al(0x3f8)
        .raw(&[0x3c, b'3', 0x74, tail.len() as u8]) // je over what resets
        .raw(&tail)
        .power_off()
}

#[test]
fn a_reset_through_port_0xcf9_boots_the_guest_again_in_the_same_process() {
    needs_kvm!();
    let mut vm = Vm::running(boots_three_times(Code::new().reset()), "");
    assert_eq!(vm.outcome(), Outcome::Clean);
    assert_eq!(vm.serial(), "123");
    let resets = vm
        .events()
        .iter()
        .filter(|kind| **kind == EventKind::Reset)
        .count();
    assert_eq!(resets, 2);
}

#[test]
fn a_reset_through_the_keyboard_controller_boots_the_guest_again() {
    needs_kvm!();
    let pulse = Code::new().raw(&[0xb0, 0xfe]).out_al(0x64).halt();
    let mut vm = Vm::running(boots_three_times(pulse), "");
    assert_eq!(vm.outcome(), Outcome::Clean);
    assert_eq!(vm.serial(), "123");
}

#[test]
fn a_triple_fault_boots_the_guest_again() {
    needs_kvm!();
    // A selector beyond the descriptor table faults, and there is no interrupt table to deliver that, or the fault about it, through.
    let mut vm = Vm::running(
        boots_three_times(
            Code::new()
                .raw(&[0x66, 0xb8, 0x50, 0x00, 0x8e, 0xd8])
                .halt(),
        ),
        "",
    );
    let outcome = vm.outcome();
    assert_eq!(outcome, Outcome::Clean, "{:?}", vm.events());
    assert_eq!(vm.serial(), "123");
}

#[test]
fn the_api_resets_a_running_guest() {
    needs_kvm!();
    let vm = Vm::running(Code::new().print("up.").halt(), "");
    vm.wait_for("up.");
    assert_eq!(vm.reset().unwrap().resets, 1);
    vm.wait_for("up.up.");
    assert_eq!(vm.view().unwrap().state, VmState::Running);
}

#[test]
fn a_guest_that_cannot_go_on_is_a_crash_with_an_outcome_of_its_own() {
    needs_kvm!();
    // Jumps to where there is neither RAM nor a device.
    let nowhere = Code::new()
        .print("x")
        .raw(&[0xb8, 0x00, 0x00, 0x00, 0xd0, 0xff, 0xe0]);
    let mut vm = Vm::running(nowhere, "");
    assert_eq!(vm.outcome(), Outcome::Crashed);
    assert_eq!(vm.serial(), "x");
    assert!(
        vm.events()
            .iter()
            .any(|kind| matches!(kind, EventKind::Crashed { reason } if !reason.is_empty()))
    );
}

#[test]
fn the_power_button_lets_a_guest_shut_itself_down() {
    needs_kvm!();
    let code = Code::new()
        .print("ready")
        .wait_for_power_button()
        .print(" bye")
        .power_off();
    let mut vm = Vm::running(code, "");
    vm.wait_for("ready");
    assert_eq!(vm.shutdown(60_000).unwrap().state, VmState::ShuttingDown);
    assert_eq!(vm.outcome(), Outcome::Clean);
    assert_eq!(vm.serial(), "ready bye");
    assert!(!vm.events().contains(&EventKind::ShutdownForced));
}

#[test]
fn a_guest_that_ignores_its_power_button_is_forced_off_at_the_deadline() {
    needs_kvm!();
    let mut vm = Vm::running(Code::new().print("deaf").raw(&[0xeb, 0xfe]), "");
    vm.wait_for("deaf");
    let begin = Instant::now();
    vm.shutdown(60_000).unwrap();
    // The second, shorter deadline counts.
    vm.shutdown(300).unwrap();
    assert_eq!(vm.outcome(), Outcome::Clean);
    assert!(begin.elapsed() >= Duration::from_millis(300));
    assert!(vm.events().contains(&EventKind::ShutdownForced));
}

#[test]
fn calls_are_idempotent_or_tell_the_state_that_forbids_them() {
    needs_kvm!();
    let vm = Vm::idle();
    assert_eq!(vm.view().unwrap_err().code, ErrorCode::NoVm);
    assert!(
        vm.ask(drover_vmm::mailbox::Message::Delete).is_ok(),
        "nothing to delete"
    );

    let config = Vm::config(vm.directory.path(), Code::new().print("on").halt(), "");
    assert!(matches!(
        vm.create(config.clone()).unwrap(),
        Created::New(_)
    ));
    assert!(matches!(
        vm.create(config.clone()).unwrap(),
        Created::Existing(_)
    ));
    let mut other = config;
    other.name = "other".to_owned();
    assert_eq!(vm.create(other).unwrap_err().state, Some(VmState::Created));
    assert_eq!(vm.shutdown(0).unwrap_err().state, Some(VmState::Created));

    assert_eq!(vm.start().unwrap().state, VmState::Running);
    assert_eq!(vm.start().unwrap().state, VmState::Running);
    let refused = vm.ask(drover_vmm::mailbox::Message::Delete).unwrap_err();
    assert_eq!(
        (refused.code, refused.state),
        (ErrorCode::WrongState, Some(VmState::Running))
    );
}

#[test]
fn a_created_vm_can_be_deleted_and_another_made() {
    needs_kvm!();
    let vm = Vm::idle();
    // A writable image admits one owner: the next round opens it only if the last one let go of it.
    let image = vm.directory.path().join("disk");
    std::fs::File::create(&image)
        .unwrap()
        .set_len(1 << 20)
        .unwrap();
    let disks = format!(
        "disks: [{{id: root, format: raw, path: {}}}]",
        image.display()
    );
    for round in 0..3 {
        let config = Vm::config(vm.directory.path(), Code::new().halt(), &disks);
        assert!(
            matches!(vm.create(config), Ok(Created::New(_))),
            "round {round}"
        );
        vm.ask(drover_vmm::mailbox::Message::Delete).unwrap();
        assert_eq!(vm.view().unwrap_err().code, ErrorCode::NoVm);
    }
}

#[test]
fn string_output_reaches_the_port_byte_by_byte() {
    needs_kvm!();
    // mov esi, text; mov ecx, 5; mov edx, 0x3f8; rep outsb
    let code = Code::new().raw(&[
        0xbe, 0x16, 0x00, 0x10, 0x00, 0xb9, 0x05, 0, 0, 0, 0xba, 0xf8, 0x03, 0, 0, 0xfc, 0xf3,
        0x6e, 0x90, 0xf4, 0xeb, 0xfd, b'r', b'e', b'p', b'!', b'\n',
    ]);
    let vm = Vm::running(code, "");
    vm.wait_for("rep!\n");
}

#[test]
fn exits_and_unclaimed_accesses_are_counted() {
    needs_kvm!();
    let code = Code::new().raw(&[0xb0, 1]).out_al(0x1234).print("x").halt();
    let vm = Vm::running(code, "");
    vm.wait_for("x");
    let metrics = vm.metrics();
    let value = |name: &str| -> u64 {
        let line = metrics
            .lines()
            .find(|line| line.starts_with(name))
            .expect(name);
        line.rsplit(' ').next().unwrap().parse().unwrap()
    };
    assert!(value("drover_vcpu_exits_total{vcpu=\"0\",kind=\"port-out\"}") >= 2);
    assert_eq!(value("drover_unclaimed_accesses_total{space=\"port\"}"), 1);
}

#[test]
fn several_processors_park_and_reset_together() {
    needs_kvm!();
    let mut vm = Vm::running(boots_three_times(Code::new().reset()), "cpus: {count: 4}");
    assert_eq!(vm.outcome(), Outcome::Clean);
    assert_eq!(vm.serial(), "123");
}

#[test]
fn what_the_host_cannot_give_is_refused_with_the_field_to_change() {
    needs_kvm!();
    let vm = Vm::idle();
    let config = Vm::config(vm.directory.path(), Code::new().halt(), "");
    let mut missing = config.clone();
    missing.boot.kernel = Some(vm.directory.path().join("nothing"));
    let error = vm.create(missing).unwrap_err();
    assert_eq!(
        (error.status(), error.field.as_deref()),
        (422, Some("boot.kernel"))
    );
    let mut huge = config.clone();
    huge.memory.size.0 = 1 << 40;
    assert_eq!(
        vm.create(huge).unwrap_err().field.as_deref(),
        Some("memory.size")
    );
    let mut no_kernel = config;
    let text = vm.directory.path().join("text");
    std::fs::write(&text, "not a kernel").unwrap();
    no_kernel.boot.kernel = Some(text.clone());
    let error = vm.create(no_kernel.clone()).unwrap_err();
    assert_eq!(error.field.as_deref(), Some("boot.kernel"));
    let path = text.display();
    assert!(
        error
            .message
            .starts_with(&format!("{path}: neither an ELF file")),
        "{error}"
    );
    assert_eq!(vm.view().unwrap_err().code, ErrorCode::NoVm);
}
