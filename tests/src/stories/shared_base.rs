//! Eight VMs on one base read it from the disk once: its bytes are in the host's memory once, in the page cache.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::json;

use crate::bench::measure::own_memory_bytes;
use crate::ensure;
use crate::failure::{Context as _, Failure, Result};
use crate::fixtures::command::succeed;
use crate::fixtures::guest::SmallGuest;
use crate::fixtures::vm::{Vm, small_guest};
use crate::pattern::{self, Pattern};
use crate::stories::disk::{overlay_disk, text};
use crate::stories::{Scene, Story};

pub(super) static STORIES: &[Story] = &[Story::small(
    "shared_base",
    "eight_vms_on_one_base_share_its_page_cache",
    share,
)
.seconds(80, 500)
.memory(8 * GUEST_MIB)];

const VMS: usize = 8;
const GUEST_MIB: u32 = 96;
/// What is in the base, and what every guest reads.
const BYTES: u64 = 64 << 20;
const SEED: u64 = 21;

/// A base of random bytes, as qcow2.
fn base(scene: &Scene) -> Result<PathBuf> {
    let raw = scene.folder.join("base.raw");
    let base = scene.folder.join("base.qcow2");
    let mut pattern = Pattern::new(SEED);
    let mut bytes = vec![0; usize::try_from(BYTES).unwrap_or(0)];
    pattern.fill(&mut bytes);
    fs::write(&raw, bytes).context("write the base")?;
    succeed(
        "qemu-img",
        &[
            "convert",
            "-f",
            "raw",
            "-O",
            "qcow2",
            &text(&raw),
            &text(&base),
        ],
    )?;
    fs::remove_file(&raw).context("remove the raw base")?;
    Ok(base)
}

/// Bytes read so far from the disk on which a file is.
fn disk_reads(path: &Path) -> Result<u64> {
    use std::os::unix::fs::MetadataExt as _;
    let device = fs::metadata(path)?.dev();
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let stat = format!("/sys/dev/block/{major}:{minor}/stat");
    let text = fs::read_to_string(&stat).context(&stat)?;
    // Documentation/block/stat.rst: the third number is sectors of 512 bytes read.
    let sectors = text
        .split_whitespace()
        .nth(2)
        .and_then(|word| word.parse::<u64>().ok());
    sectors
        .map(|sectors| sectors * 512)
        .ok_or_else(|| Failure::Broken(format!("{stat}: {text}")))
}

/// The host's memory as it counts it itself, in bytes.
fn host_memory(name: &str) -> Result<u64> {
    let text = fs::read_to_string("/proc/meminfo")?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    line.and_then(|rest| rest.trim().trim_end_matches(" kB").parse::<u64>().ok())
        .map(|kib| kib * 1024)
        .ok_or_else(|| Failure::Broken(format!("/proc/meminfo has no {name}")))
}

fn share(scene: &Scene) -> Result {
    let guest = SmallGuest::prepare(scene)?;
    let base = base(scene)?;
    let mut vms = Vec::new();
    for number in 1..=VMS {
        let folder = scene.folder.join(format!("vm-{number}"));
        fs::create_dir(&folder)?;
        let top = folder.join("top.qcow2");
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
        let mut definition = small_guest(&guest, &folder);
        definition["memory"] = json!({"size": format!("{GUEST_MIB}MiB")});
        definition["disks"] = json!([overlay_disk(&base, &top)]);
        let scene = Scene {
            site: scene.site.clone(),
            folder,
        };
        // One after the other: together they would wait for each other's boot.
        vms.push(Vm::boot(&scene, &definition)?);
    }
    // What making the base left in the cache goes, so that reading it is seen.
    rustix::fs::sync();
    fs::write("/proc/sys/vm/drop_caches", "1").context("drop the page cache")?;
    let (reads, cache) = (disk_reads(&base)?, host_memory("Cached")?);
    let expected = pattern::expected(SEED, BYTES);
    for (number, vm) in vms.iter_mut().enumerate() {
        // Past the guest's own cache, which is not the one in question.
        let read = vm.console.run(
            &format!(
                "dd if=/dev/vda bs=1M iflag=direct 2>/tmp/dd.log | lab-guest sum /proc/self/fd/0 {BYTES}"
            ),
            Duration::from_secs(120),
        )?;
        ensure!(
            read == expected,
            "guest {} read {read}, not {expected}",
            number + 1
        );
    }
    let (reads, cache) = (
        disk_reads(&base)? - reads,
        host_memory("Cached")?.saturating_sub(cache),
    );
    let mut own = 0;
    for vm in &vms {
        own += own_memory_bytes(vm.id(), u64::from(GUEST_MIB) << 20)?;
    }
    println!(
        "{VMS} guests read {BYTES} bytes each: {reads} bytes were read from the disk, the host's page cache grew by {cache} bytes, \
         all VMMs together take {own} bytes of their own"
    );
    ensure!(
        (BYTES..BYTES * 3 / 2).contains(&reads),
        "of the base, {BYTES} bytes, {reads} were read from the disk"
    );
    ensure!(
        (BYTES * 3 / 4..BYTES * 3 / 2).contains(&cache),
        "the page cache grew by {cache} bytes"
    );
    // A copy in each process would be seen here.
    ensure!(own < BYTES, "the VMMs take {own} bytes of their own");
    for vm in vms {
        vm.power_off()?;
    }
    Ok(())
}
