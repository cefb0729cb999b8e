//! Definitions as users write them: what is accepted, and what they are told otherwise.

use drover_api::definition::{ByteSize, SerialConfig, TapConfig, VmConfig, parse};
use proptest::prelude::*;

const FULL: &str = r#"
name: t1
uuid: 6f0d2f5e-4a0c-4c5b-9f0e-1a2b3c4d5e6f
cpus: {count: 8, topology: {sockets: 2, dies: 1, cores: 2, threads: 2}, model: host}
memory: {size: 512MiB, hugepages: 2MiB, prefault: true, shared: true}
boot: {kernel: /x/vmlinux, initrd: /x/initrd, cmdline: "console=ttyS0 panic=-1"}
disks:
  - {id: root, path: /x/overlay.qcow2, format: qcow2, backing: [{path: /x/base.qcow2, format: qcow2}], queues: 1}
  - {id: seed, path: /x/seed.iso, format: raw, read_only: true, cache: buffered, discard: ignore, serial: S1}
nets:
  - {id: eth0, tap: {name: tap0}, mac: "52:54:00:00:00:01", mtu: 1450, queue_pairs: 2}
  - {id: eth1, tap: {fds: [5, 6]}, queue_pairs: 2, offloads: false}
  - {id: eth2, tap: {create: t1-eth2}, queue_size: 512}
serial: {mode: socket, path: /x/serial.sock, scrollback: 1MiB}
rng: false
"#;

const SMALL: &str = "name: t1\nmemory: {size: 64MiB}\nboot: {kernel: /x/vmlinux}\n";

/// What a user is told about `SMALL` with `addition`, or with `new` instead of `old`.
fn message(text: &str) -> String {
    let result = parse(text.as_bytes(), "vm.yaml")
        .and_then(|vm| vm.validate().map_err(|error| error.with_source("vm.yaml")));
    match result {
        Ok(vm) => panic!("accepted: {vm:?}"),
        Err(error) => error.to_string(),
    }
}

fn with(addition: &str) -> String {
    message(&format!("{SMALL}{addition}"))
}

fn instead(old: &str, new: &str) -> String {
    assert!(FULL.contains(old));
    message(&FULL.replacen(old, new, 1))
}

#[test]
fn every_field_is_read() {
    let vm = parse(FULL.as_bytes(), "vm.yaml").unwrap();
    vm.validate().unwrap();
    assert_eq!(vm.cpus.topology.unwrap().threads, 2);
    assert_eq!(vm.memory.size, ByteSize::mib(512));
    assert_eq!(vm.disks[1].serial.as_deref(), Some("S1"));
    assert_eq!(vm.nets[1].tap, TapConfig::Fds(vec![5, 6]));
    assert_eq!(vm.nets[2].tap, TapConfig::Create("t1-eth2".into()));
    let socket = SerialConfig::Socket {
        path: "/x/serial.sock".into(),
        scrollback: ByteSize::mib(1),
    };
    assert_eq!(vm.serial, socket);
    assert!(!vm.rng);
}

#[test]
fn what_is_left_out_has_a_default() {
    let vm = parse(SMALL.as_bytes(), "vm.yaml").unwrap();
    vm.validate().unwrap();
    assert_eq!(
        (vm.cpus.count, vm.rng, vm.serial),
        (1, true, SerialConfig::None)
    );
}

#[test]
fn a_definition_written_as_json_or_yaml_is_the_same() {
    let vm = parse(FULL.as_bytes(), "vm.yaml").unwrap();
    let json = serde_json::to_vec(&vm).unwrap();
    assert_eq!(parse(&json, "vm.json").unwrap(), vm);
    let yaml = serde_norway::to_string(&serde_json::to_value(&vm).unwrap()).unwrap();
    assert_eq!(parse(yaml.as_bytes(), "vm.yaml").unwrap(), vm);
    let escaped =
        br#"{"name":"t1","memory":{"size":67108864},"boot":{"kernel":"\/k-\ud83d\ude00"}}"#;
    assert_eq!(
        parse(escaped, "vm.json")
            .unwrap()
            .boot
            .kernel
            .unwrap()
            .to_str(),
        Some("/k-\u{1f600}")
    );
}

#[test]
fn a_wrong_shape_is_named_with_file_and_field() {
    let cases = [
        (
            instead("format: qcow2", "format: vmdk"),
            r#"vm.yaml: disks[0].format: unknown variant "vmdk", expected "raw" or "qcow2""#,
        ),
        (
            instead(
                "path: /x/base.qcow2, format: qcow2",
                "path: /b, format: QCOW2",
            ),
            r#"vm.yaml: disks[0].backing[0].format: unknown variant "QCOW2", expected "raw" or "qcow2""#,
        ),
        (
            instead("queues: 1", "queues: many"),
            r#"vm.yaml: disks[0].queues: invalid type: string "many", expected an integer, 0 to 65535"#,
        ),
        (
            instead("count: 8", "count: 300"),
            r#"vm.yaml: cpus.count: invalid value: integer 300, expected an integer, 0 to 255"#,
        ),
        (
            instead("512MiB", "512MB"),
            r#"vm.yaml: memory.size: "512MB": unknown unit "MB", expected KiB, MiB, GiB or TiB"#,
        ),
        (
            instead("52:54:00:00:00:01", "53:54:00:00:00:01"),
            r#"vm.yaml: nets[0].mac: "53:54:00:00:00:01": a group (multicast) address cannot be a card's own: the first byte must be even"#,
        ),
        (instead("6f0d2f5e-", "6f0d2f5e"), "vm.yaml: uuid: "),
        (
            instead("{name: tap0}", "{nam: tap0}"),
            r#"vm.yaml: nets[0].tap: unknown variant "nam", expected one of "name", "fds", "create""#,
        ),
        (
            instead("{name: tap0}", "{name: tap0, create: tap1}"),
            "vm.yaml: nets[0].tap: ",
        ),
        (
            instead("fds: [5, 6]", "fds: [5, x]"),
            r#"vm.yaml: nets[1].tap.fds[1]: invalid type: string "x", expected an integer"#,
        ),
        (
            instead("mode: socket", "mode: tcp"),
            r#"vm.yaml: serial.mode: unknown variant "tcp""#,
        ),
        (
            instead("scrollback", "scroll"),
            r#"vm.yaml: serial.scroll: unknown field "scroll", expected one of "mode", "path", "scrollback""#,
        ),
        (
            with("serial: {mode: none, path: /x}\n"),
            r#"vm.yaml: serial: field "path" is for the modes file and socket only"#,
        ),
        (
            with("serial: {mode: file}\n"),
            r#"vm.yaml: serial: missing field "path": modes file and socket need one"#,
        ),
        (
            with("colour: red\n"),
            r#"vm.yaml: colour: unknown field "colour", expected one of "name", "uuid", "cpus""#,
        ),
        (with("name: t2\n"), r#"vm.yaml: duplicate field "name""#),
        (with("1: 2\n"), "vm.yaml: "),
        (
            message("name: t1\nmemory: {size: 64MiB}\n"),
            r#"vm.yaml: missing field "boot""#,
        ),
        (
            message("name: t1\nmemory: {}\nboot: {kernel: k}\n"),
            r#"vm.yaml: memory: missing field "size""#,
        ),
        (message("name: [\n"), "vm.yaml: "),
        (message(""), "vm.yaml: "),
        (message("name: !x t1\n"), "vm.yaml: "),
        (message("---\nname: a\n---\nname: b\n"), "vm.yaml: "),
        (message("\u{0}"), "vm.yaml: "),
        (
            message("- a\n"),
            "vm.yaml: invalid type: sequence, expected a mapping",
        ),
        (
            message("name: t1\nmemory: [64MiB]\nboot: {kernel: k}\n"),
            "vm.yaml: memory: invalid type: sequence, expected a mapping",
        ),
        (
            instead("format: qcow2", "format: {qcow2: null}"),
            "vm.yaml: disks[0].format.qcow2: invalid type: mapping, expected a string",
        ),
        (
            instead("queues: 1", "queues: null"),
            "vm.yaml: disks[0].queues: invalid type: null, expected an integer, 0 to 65535",
        ),
        (instead("{name: tap0}", "tap0"), "vm.yaml: nets[0].tap: "),
    ];
    for (message, expected) in cases {
        println!("{message}");
        assert!(message.starts_with(expected), "{message}\n{expected}");
        assert!(!message.contains(['\n', '`']), "{message}");
    }
}

#[test]
fn a_value_out_of_range_is_named_with_the_range() {
    let cases = [
        (
            instead("name: t1", "name: T1"),
            r#"vm.yaml: name: "T1" is no DNS label: 1 to 63 of a-z, 0-9 and inner hyphens"#,
        ),
        (
            instead("count: 8", "count: 0"),
            "vm.yaml: cpus.count: 0 is out of range, 1 to 64",
        ),
        (
            instead("512MiB", "16MiB"),
            "vm.yaml: memory.size: 16MiB is out of range, 32MiB to 1TiB",
        ),
        (
            instead("512MiB", "65535KiB"),
            "vm.yaml: memory.size: 65535KiB is no multiple of 2MiB",
        ),
        (
            instead("hugepages: 2MiB", "hugepages: 4MiB"),
            "vm.yaml: memory.hugepages: 4MiB is no huge page",
        ),
        (
            instead("/x/vmlinux", "''"),
            "vm.yaml: boot.kernel: the path is empty",
        ),
        (
            instead("panic=-1", "a\\nb"),
            "vm.yaml: boot.cmdline: the control character '\\n' is not allowed",
        ),
        (
            instead("panic=-1", &"x".repeat(2048)),
            "vm.yaml: boot.cmdline: 2062 bytes are too many, at most 2047",
        ),
        (
            instead("id: root", "id: -root"),
            r#"vm.yaml: disks[0].id: "-root" is no id"#,
        ),
        (
            instead("queues: 1", "queues: 65"),
            "vm.yaml: disks[0].queues: 65 is out of range, 1 to 64",
        ),
        (
            instead("queues: 1", "queue_size: 100"),
            "vm.yaml: disks[0].queue_size: 100 is no power of two",
        ),
        (
            instead("serial: S1", "serial: 123456789012345678901x"),
            "vm.yaml: disks[1].serial: ",
        ),
        (
            instead("mtu: 1450", "mtu: 67"),
            "vm.yaml: nets[0].mtu: 67 is out of range, 68 to 65521",
        ),
        (
            instead("queue_pairs: 2", "queue_pairs: 17"),
            "vm.yaml: nets[0].queue_pairs: 17 is out of range, 1 to 16",
        ),
        (
            instead("tap0", "a-name-too-long-"),
            "vm.yaml: nets[0].tap.name: ",
        ),
        (
            instead("fds: [5, 6]", "fds: [5, 1]"),
            "vm.yaml: nets[1].tap.fds[1]: 1 is no descriptor to hand over",
        ),
        (
            instead("scrollback: 1MiB", "scrollback: 17MiB"),
            "vm.yaml: serial.scrollback: 17MiB is too large, at most 16MiB",
        ),
        (
            instead("/x/serial.sock", &format!("/{}", "x".repeat(107))),
            "vm.yaml: serial.path: 108 bytes are too many",
        ),
        (
            instead("id: eth1", "id: root"),
            r#"vm.yaml: nets[1].id: "root" is taken already by disks[0].id"#,
        ),
        (
            instead("create: t1-eth2", "create: tap0"),
            r#"vm.yaml: nets[2].tap: "tap0" is taken already by nets[0].tap"#,
        ),
        (
            instead("[5, 6]", "[5, 5]"),
            r#"vm.yaml: nets[1].tap.fds[1]: "5" is taken already by nets[1].tap.fds[0]"#,
        ),
    ];
    for (message, expected) in cases {
        assert!(message.starts_with(expected), "{message}\n{expected}");
    }
}

#[test]
fn what_excludes_each_other_is_refused_with_the_reason() {
    let cases = [
        (
            instead("threads: 2", "threads: 1"),
            "vm.yaml: cpus.topology: sockets x dies x cores x threads must be cpus.count",
        ),
        (
            instead("prefault: true", "overcommit: true"),
            "vm.yaml: memory.overcommit: huge pages",
        ),
        (
            instead("hugepages: 2MiB", "overcommit: true"),
            "vm.yaml: memory.overcommit: memory that is touched",
        ),
        (
            instead("queues: 1", "allow_header_backing: true"),
            "vm.yaml: disks[0].allow_header_backing: ",
        ),
        (
            instead("overlay.qcow2, format: qcow2", "overlay.raw, format: raw"),
            "vm.yaml: disks[0].backing: a raw image",
        ),
        (
            instead("serial: S1", "allow_header_backing: true"),
            "vm.yaml: disks[1].allow_header_backing: a raw image",
        ),
        (
            instead("backing: [", "backing: [{path: /x/r, format: raw}, "),
            "vm.yaml: disks[0].backing[0].format: a raw image",
        ),
        (
            instead("/x/seed.iso", "/x/overlay.qcow2"),
            "vm.yaml: disks[1].path: an image that one disk writes",
        ),
        (
            instead("/x/base.qcow2", "/x/overlay.qcow2"),
            "vm.yaml: disks[0].backing[0].path: a layer below",
        ),
        (
            instead("[5, 6]", "[5]"),
            r#"vm.yaml: nets[1].tap.fds: there must be one descriptor for each of "queue_pairs""#,
        ),
    ];
    for (message, expected) in cases {
        assert!(message.starts_with(expected), "{message}\n{expected}");
    }
}

#[test]
fn aliases_that_multiply_are_refused_before_they_fill_memory() {
    let mut text = String::from("a0: &a0 [x, x, x, x, x, x, x, x, x]\n");
    for level in 1..12 {
        let below = format!("*a{}, ", level - 1).repeat(9);
        text.push_str(&format!("a{level}: &a{level} [{below}]\n"));
    }
    assert!(message(&text).starts_with("vm.yaml: "));
}

#[test]
fn hostile_nesting_is_refused_in_time_that_grows_with_its_length() {
    let began = std::time::Instant::now();
    for text in [
        "[", "{", "- ", "? ", "a: [", "&a [", "[]{", "!x [", "a:\n ", "- [}", "'\n", "[a, ",
    ] {
        assert!(message(&text.repeat((1 << 20) / text.len())).starts_with("vm.yaml: "));
    }
    assert!(began.elapsed().as_secs() < 30, "{:?}", began.elapsed());
}

#[test]
fn derived_identities_stay() {
    let vm = VmConfig {
        uuid: None,
        ..parse(FULL.as_bytes(), "vm.yaml").unwrap()
    };
    assert_eq!(vm.system_uuid(), vm.clone().system_uuid());
    assert_eq!(vm.system_uuid().get_version_num(), 5);
    assert_eq!(vm.mac_of(&vm.nets[0]).to_string(), "52:54:00:00:00:01");
    assert_ne!(vm.mac_of(&vm.nets[1]), vm.mac_of(&vm.nets[2]));
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn no_text_is_answered_by_anything_but_a_definition_or_one_line(text in "(?s).{0,200}") {
        if let Err(error) = parse(text.as_bytes(), "vm.yaml") {
            prop_assert!(!error.to_string().contains('\n'));
        }
    }

    #[test]
    fn a_damaged_definition_is_answered_by_a_definition_or_one_line(at in 0..FULL.len(), byte: u8) {
        let mut text = FULL.as_bytes().to_vec();
        text[at] = byte;
        match parse(&text, "vm.yaml").and_then(|vm| vm.validate()) {
            Ok(()) => {}
            Err(error) => prop_assert!(!error.to_string().contains('\n')),
        }
    }
}
