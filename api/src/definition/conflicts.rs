//! The one table of what excludes what, so that nothing fails halfway through a life. A new feature adds its rows here.

use super::{DefinitionError, DiskConfig, ImageFormat, NetConfig, TapConfig, VmConfig};

/// A combination that cannot be.
struct Conflict {
    /// Where it is in a definition: the path of the field to change.
    find: fn(&VmConfig) -> Option<String>,
    why: &'static str,
}

const CONFLICTS: &[Conflict] = &[
    Conflict {
        find: |vm| {
            let t = vm.cpus.topology?;
            let product = [t.sockets, t.dies, t.cores, t.threads]
                .map(u32::from)
                .iter()
                .product::<u32>();
            (product != u32::from(vm.cpus.count)).then(|| "cpus.topology".into())
        },
        why: "sockets x dies x cores x threads must be cpus.count",
    },
    Conflict {
        find: |vm| {
            let both = vm.memory.hugepages.is_some() && vm.memory.overcommit;
            both.then(|| "memory.overcommit".into())
        },
        why: "huge pages are reserved when the VM is made and cannot be overcommitted",
    },
    Conflict {
        find: |vm| {
            let both = vm.memory.prefault && vm.memory.overcommit;
            both.then(|| "memory.overcommit".into())
        },
        why: "memory that is touched before the guest starts cannot be overcommitted",
    },
    Conflict {
        find: |vm| {
            disk(vm, "allow_header_backing", |d| {
                d.allow_header_backing && !d.backing.is_empty()
            })
        },
        why: "the layers come from `backing` or from the image's header, never both",
    },
    Conflict {
        find: |vm| {
            disk(vm, "backing", |d| {
                d.format == ImageFormat::Raw && !d.backing.is_empty()
            })
        },
        why: "a raw image has no layers below it",
    },
    Conflict {
        find: |vm| {
            disk(vm, "allow_header_backing", |d| {
                d.format == ImageFormat::Raw && d.allow_header_backing
            })
        },
        why: "a raw image has no header to name a backing file",
    },
    Conflict {
        find: |vm| {
            vm.disks.iter().enumerate().find_map(|(index, disk)| {
                let raw = |layer: &super::BackingConfig| layer.format == ImageFormat::Raw;
                let above = disk
                    .backing
                    .split_last()
                    .map_or(&[][..], |(_, above)| above);
                let layer = above.iter().position(raw)?;
                Some(format!("disks[{index}].backing[{layer}].format"))
            })
        },
        why: "a raw image has no layers below it: only the last layer may be raw",
    },
    Conflict {
        find: |vm| {
            disk(vm, "limit_group", |d| {
                d.limit_group.is_some() && d.limits.is_some()
            })
        },
        why: "a disk keeps to `limits` of its own or to those of a group, never both",
    },
    Conflict {
        find: |vm| {
            vm.disks.iter().enumerate().find_map(|(index, disk)| {
                let same = |other: &DiskConfig| {
                    other.path == disk.path && !(other.read_only && disk.read_only)
                };
                vm.disks[..index]
                    .iter()
                    .any(same)
                    .then(|| format!("disks[{index}].path"))
            })
        },
        why: "an image that one disk writes cannot be another disk's too",
    },
    Conflict {
        find: |vm| {
            vm.disks.iter().enumerate().find_map(|(index, disk)| {
                let written = |path| {
                    vm.disks
                        .iter()
                        .any(|other| !other.read_only && &other.path == path)
                };
                let layer = disk.backing.iter().position(|layer| written(&layer.path))?;
                Some(format!("disks[{index}].backing[{layer}].path"))
            })
        },
        why: "a layer below a disk is read-only, but this image is written as a disk of this VM",
    },
    Conflict {
        find: |vm| {
            let private = !vm.vhost_user_disks.is_empty() && !vm.memory.shared;
            private.then(|| "memory.shared".into())
        },
        why: "a process that serves a vhost-user disk must be able to map the guest's memory: set it to true",
    },
    Conflict {
        find: |vm| {
            net(
                vm,
                "tap.fds",
                |n| matches!(&n.tap, TapConfig::Fds(fds) if fds.len() != usize::from(n.queue_pairs)),
            )
        },
        why: "there must be one descriptor for each of `queue_pairs`",
    },
];

/// The first row of the table that applies.
pub(super) fn check(vm: &VmConfig) -> Result<(), DefinitionError> {
    for conflict in CONFLICTS {
        if let Some(field) = (conflict.find)(vm) {
            return Err(DefinitionError::new(field, conflict.why.replace('`', "\"")));
        }
    }
    Ok(())
}

fn disk(vm: &VmConfig, field: &str, applies: fn(&DiskConfig) -> bool) -> Option<String> {
    let index = vm.disks.iter().position(applies)?;
    Some(format!("disks[{index}].{field}"))
}

fn net(vm: &VmConfig, field: &str, applies: fn(&NetConfig) -> bool) -> Option<String> {
    let index = vm.nets.iter().position(applies)?;
    Some(format!("nets[{index}].{field}"))
}
