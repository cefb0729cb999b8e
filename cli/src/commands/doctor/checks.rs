//! What doctor looks at. Nothing is changed by looking.

use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use drover_worker::{StateDir, locate_vmm};
use rustix::fs::{OFlags, statfs};

use super::Finding;
use crate::output;

/// Where distributions put the UEFI firmware that boots unchanged (the builds without SMM).
const FIRMWARE: [&str; 4] = [
    "/usr/share/OVMF/OVMF_CODE_4M.fd",
    "/usr/share/edk2/ovmf/OVMF_CODE.fd",
    "/usr/share/edk2/x64/OVMF_CODE.4m.fd",
    "/usr/share/qemu/ovmf-x86_64-4m-code.bin",
];

/// CAP_NET_ADMIN and CAP_SYS_PTRACE (capabilities(7)).
const CAP_NET_ADMIN: u32 = 12;
const CAP_SYS_PTRACE: u32 = 19;

/// File systems (statfs(2)) whose locks stay on one node.
const NODE_LOCAL_LOCKS: [(u64, &str); 4] = [
    (0x6969, "NFS"),
    (0x7461_636f, "OCFS2"),
    (0xff53_4d42, "CIFS"),
    (0xfe53_4d42, "SMB2"),
];

pub(super) fn all(state: &StateDir) -> Vec<Finding> {
    vec![
        vmm(),
        kvm(),
        tun(),
        vhost_net(),
        net_admin(),
        io_uring(),
        userfaultfd(),
        transparent_huge_pages(),
        huge_pages(),
        memory(),
        firmware(),
        direct_io(state),
        locks(state),
    ]
}

fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

fn open_device(path: &str) -> io::Result<()> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .map(drop)
}

fn vmm() -> Finding {
    match locate_vmm() {
        Ok(path) => Finding::ok("drover-vmm", path.display().to_string()),
        Err(error) => Finding::fail("drover-vmm", "not found", error.to_string()),
    }
}

/// The virtualisation extension that the processor offers.
fn extension(cpuinfo: &str) -> Option<&'static str> {
    let flags = cpuinfo.lines().find(|line| line.starts_with("flags"))?;
    ["vmx", "svm"]
        .into_iter()
        .find(|flag| flags.split_whitespace().any(|word| word == *flag))
}

fn kvm() -> Finding {
    const CHECK: &str = "kvm";
    match (open_device("/dev/kvm"), extension(&read("/proc/cpuinfo"))) {
        (Ok(()), Some(extension)) => Finding::ok(CHECK, format!("hardware ({extension})")),
        (Ok(()), None) => Finding::warn(
            CHECK,
            "/dev/kvm works, but the processor shows neither vmx nor svm: guests run in a software emulation",
            "for real guests use a host with virtualisation, or switch nested virtualisation on",
        ),
        (Err(error), extension) => match error.kind() {
            io::ErrorKind::PermissionDenied => Finding::fail(
                CHECK,
                "no permission for /dev/kvm",
                "add the user to the group kvm (usermod -aG kvm USER) and log in again",
            ),
            _ => match extension {
                Some("svm") => {
                    Finding::fail(CHECK, format!("/dev/kvm: {error}"), "modprobe kvm_amd")
                }
                Some(_) => Finding::fail(CHECK, format!("/dev/kvm: {error}"), "modprobe kvm_intel"),
                None => Finding::fail(
                    CHECK,
                    format!("/dev/kvm: {error}"),
                    "switch virtualisation on in the firmware's set-up, or nested virtualisation on in the hypervisor above",
                ),
            },
        },
    }
}

fn tun() -> Finding {
    match open_device("/dev/net/tun") {
        Ok(()) => Finding::ok("tun", "/dev/net/tun"),
        Err(error) => Finding::warn(
            "tun",
            format!("/dev/net/tun: {error}"),
            "without it workers have no network: modprobe tun, and let the user open it",
        ),
    }
}

fn vhost_net() -> Finding {
    match open_device("/dev/vhost-net") {
        Ok(()) => Finding::ok("vhost-net", "/dev/vhost-net"),
        Err(error) => Finding::warn(
            "vhost-net",
            format!("/dev/vhost-net: {error}"),
            "only speeds the network up: modprobe vhost_net",
        ),
    }
}

fn has_capability(status: &str, capability: u32) -> bool {
    let mask = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .is_some_and(|mask| mask >> capability & 1 == 1)
}

fn net_admin() -> Finding {
    if has_capability(&read("/proc/self/status"), CAP_NET_ADMIN) {
        Finding::ok("net-admin", "taps can be made and put on bridges")
    } else {
        Finding::warn(
            "net-admin",
            "no CAP_NET_ADMIN",
            "run as root, or make taps beforehand (ip tuntap add NAME mode tap user USER) and name them under network.tap",
        )
    }
}

fn io_uring() -> Finding {
    const CHECK: &str = "io_uring";
    match io_uring::IoUring::new(2) {
        Ok(_) => Finding::ok(CHECK, "rings can be made"),
        Err(error)
            if read("/proc/sys/kernel/io_uring_disabled")
                .trim()
                .parse::<u8>()
                .is_ok_and(|value| value > 0) =>
        {
            Finding::warn(
                CHECK,
                format!("switched off: {error}"),
                "disks fall back to ordinary calls: sysctl kernel.io_uring_disabled=0",
            )
        }
        Err(error) => Finding::warn(
            CHECK,
            format!("not available: {error}"),
            "disks fall back to ordinary calls: allow it in the seccomp profile of the container",
        ),
    }
}

fn userfaultfd() -> Finding {
    const CHECK: &str = "userfaultfd";
    let allowed = has_capability(&read("/proc/self/status"), CAP_SYS_PTRACE)
        || read("/proc/sys/vm/unprivileged_userfaultfd").trim() == "1"
        || open_device("/dev/userfaultfd").is_ok();
    if allowed {
        Finding::ok(CHECK, "kernel faults can be handled")
    } else {
        Finding::warn(
            CHECK,
            "not allowed",
            "only lazy restore and post-copy need it: let the user open /dev/userfaultfd, or sysctl vm.unprivileged_userfaultfd=1",
        )
    }
}

fn transparent_huge_pages() -> Finding {
    const CHECK: &str = "transparent huge pages";
    const SWITCH: &str = "/sys/kernel/mm/transparent_hugepage/enabled";
    let setting = read(SWITCH);
    match setting
        .split_once('[')
        .and_then(|(_, rest)| rest.split_once(']'))
    {
        Some((word @ ("always" | "madvise"), _)) => Finding::ok(CHECK, word),
        Some((word, _)) => Finding::warn(
            CHECK,
            word,
            format!("guests are slower without: echo madvise > {SWITCH}"),
        ),
        None => Finding::warn(CHECK, "not in this kernel", "guests are slower without"),
    }
}

/// A number of /proc/meminfo, in its own unit.
fn meminfo(text: &str, name: &str) -> Option<u64> {
    let rest = text
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    rest.split_whitespace().next()?.parse().ok()
}

fn huge_pages() -> Finding {
    let text = read("/proc/meminfo");
    let number = |name| meminfo(&text, name).unwrap_or(0);
    let size = output::bytes(number("Hugepagesize") * 1024);
    match number("HugePages_Total") {
        0 => Finding::ok(
            "huge pages",
            "none reserved (only memory.hugepages needs them: sysctl vm.nr_hugepages=N)",
        ),
        total => Finding::ok(
            "huge pages",
            format!("{} of {total} free, {size} each", number("HugePages_Free")),
        ),
    }
}

fn memory() -> Finding {
    match meminfo(&read("/proc/meminfo"), "MemAvailable") {
        Some(kib) => Finding::ok("memory", format!("{} available", output::bytes(kib * 1024))),
        None => Finding::warn(
            "memory",
            "/proc/meminfo does not say what is available",
            "mount /proc",
        ),
    }
}

fn firmware() -> Finding {
    match FIRMWARE.into_iter().find(|path| Path::new(path).is_file()) {
        Some(path) => Finding::ok("firmware", path),
        None => Finding::warn(
            "firmware",
            "no OVMF found",
            "direct kernel boot needs none; for UEFI: apt install ovmf",
        ),
    }
}

/// The nearest folder above the workers' that exists; it is the file system they will be on.
fn nearest(path: &Path) -> PathBuf {
    path.ancestors()
        .find(|path| path.is_dir())
        .unwrap_or(Path::new("/"))
        .to_path_buf()
}

fn direct_io(state: &StateDir) -> Finding {
    const CHECK: &str = "direct I/O";
    let folder = nearest(state.path());
    let flags = OFlags::TMPFILE | OFlags::DIRECT;
    let opened = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(i32::try_from(flags.bits()).unwrap_or(0))
        .open(&folder);
    match opened {
        Ok(_) => Finding::ok(CHECK, folder.display().to_string()),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Finding::fail(
            CHECK,
            format!("{}: {error}", folder.display()),
            "choose a --state-dir that the user can write",
        ),
        Err(error) => Finding::fail(
            CHECK,
            format!("{}: no O_DIRECT there: {error}", folder.display()),
            "choose a --state-dir on a local disk (ext4, xfs, btrfs)",
        ),
    }
}

fn locks(state: &StateDir) -> Finding {
    const CHECK: &str = "image locks";
    let folder = nearest(state.path());
    // The kernel's number is 32 bits wide, whatever the type that carries it.
    let kind = statfs(&folder).map(|found| found.f_type as u64 & 0xffff_ffff);
    match kind {
        Err(error) => Finding::warn(
            CHECK,
            format!("{}: {error}", folder.display()),
            "choose another --state-dir",
        ),
        Ok(kind) => match NODE_LOCAL_LOCKS.iter().find(|(number, _)| *number == kind) {
            None => Finding::ok(
                CHECK,
                format!("{} is on a local file system", folder.display()),
            ),
            Some((_, name)) => Finding::warn(
                CHECK,
                format!(
                    "{} is on {name}, whose locks may not reach other nodes",
                    folder.display()
                ),
                "make sure that one node at a time runs a worker from there",
            ),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_processors_extension_is_a_word_of_its_flags() {
        assert_eq!(
            extension("model: svm\nflags\t\t: fpu svm sse\n"),
            Some("svm")
        );
        assert_eq!(extension("flags\t\t: fpu vmx\n"), Some("vmx"));
        assert_eq!(extension("flags\t\t: fpu svm_lock\n"), None);
        assert_eq!(extension(""), None);
    }

    #[test]
    fn capabilities_and_memory_are_read_from_the_kernels_own_words() {
        assert!(has_capability(
            "Name:\tx\nCapEff:\t0000000000001000\n",
            CAP_NET_ADMIN
        ));
        assert!(!has_capability(
            "CapEff:\t0000000000000800\n",
            CAP_NET_ADMIN
        ));
        assert_eq!(
            meminfo("MemAvailable:    1024 kB\n", "MemAvailable"),
            Some(1024)
        );
    }

    #[test]
    fn every_check_says_what_to_do_unless_all_is_well() {
        let folder = tempfile::tempdir().unwrap();
        let state = StateDir::new(Some(&folder.path().join("not/yet"))).unwrap();
        for finding in all(&state) {
            assert_eq!(
                finding.remedy.is_none(),
                finding.verdict == super::super::Verdict::Ok,
                "{finding:?}"
            );
            assert!(!finding.found.is_empty(), "{finding:?}");
        }
        assert!(
            !folder.path().join("not").exists(),
            "looking changed something"
        );
    }
}
