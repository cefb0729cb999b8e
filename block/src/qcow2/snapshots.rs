//! The internal snapshot table: read so that what snapshots refer to is left alone. Never written.

use zerocopy::FromBytes;

use super::header::TableAt;
use super::spec::{self, SnapshotHead};

/// What matters of an internal snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Snapshot {
    /// Its L1 table.
    pub(crate) l1: TableAt,
    /// Size of the disk in it; absent in old images, where it is that of the active disk.
    pub(crate) size: Option<u64>,
    /// Its name.
    pub(crate) name: String,
    /// What tells it from others: a number, as a rule.
    pub(crate) id: String,
    /// When it was taken, in seconds since 1970.
    pub(crate) date_seconds: u32,
    /// Bytes of a machine's state that was saved with it.
    pub(crate) vm_state_bytes: u64,
}

/// Decodes `count` entries from the bytes at the table's offset; also the number of bytes the table has. The error says what is
/// wrong. `bytes` may be longer than the table.
pub(crate) fn parse(bytes: &[u8], count: u32) -> Result<(Vec<Snapshot>, u64), &'static str> {
    const SHORT: &str = "the snapshot table is cut short";
    let mut snapshots = Vec::new();
    let mut at = 0usize;
    for _ in 0..count {
        let (head, rest) = bytes
            .get(at..)
            .and_then(|rest| SnapshotHead::read_from_prefix(rest).ok())
            .ok_or(SHORT)?;
        let extra_size = head.extra_data_size.get();
        if extra_size > spec::MAX_SNAPSHOT_EXTRA {
            return Err("a snapshot has too much extra data");
        }
        let (extra_size, id, name) = (
            extra_size as usize,
            usize::from(head.id_size.get()),
            usize::from(head.name_size.get()),
        );
        let extra = rest.get(..extra_size).ok_or(SHORT)?;
        let id_bytes = rest
            .get(extra_size..)
            .and_then(|rest| rest.get(..id))
            .ok_or(SHORT)?;
        let name_bytes = rest
            .get(extra_size + id..)
            .and_then(|rest| rest.get(..name))
            .ok_or(SHORT)?;
        let l1 = TableAt {
            offset: head.l1_table_offset.get(),
            entries: head.l1_size.get().into(),
        };
        if l1.entries * 8 > spec::MAX_L1_BYTES || l1.offset >= spec::HOST_LIMIT {
            return Err("a snapshot's L1 table cannot be");
        }
        snapshots.push(Snapshot {
            l1,
            size: extra
                .get(8..)
                .and_then(|rest| rest.first_chunk())
                .map(|bytes| u64::from_be_bytes(*bytes)),
            name: String::from_utf8_lossy(name_bytes).into_owned(),
            id: String::from_utf8_lossy(id_bytes).into_owned(),
            date_seconds: head.date_seconds.get(),
            vm_state_bytes: extra
                .first_chunk()
                .map_or(u64::from(head.vm_state_size.get()), |bytes| {
                    u64::from_be_bytes(*bytes)
                }),
        });
        let length = size_of::<SnapshotHead>() + extra_size + id + name;
        at = at.checked_add(length.next_multiple_of(8)).ok_or(SHORT)?;
    }
    Ok((snapshots, at as u64))
}
