//! Which layer below a header names, changed in one write of one sector: a power cut leaves the old name or the new one.
//!
//! ```text
//!  0      header_length                    512
//!  | fixed | backing format | others | END |   name, if it fits …   | … else here, written and durable beforehand |
//!  └──────────── one sector ───────────────┘
//! ```
//!
//! Extensions are kept. Only the table of feature names, which does nothing but word other tools' messages, goes where the
//! sector would be too small for all.

use zerocopy::{FromBytes, IntoBytes};

use super::Qcow2;
use super::spec::{self, ExtensionHead, HEADER_V2, extension};
use crate::Format;
use crate::buffers::Pages;
use crate::error::{ErrorKind, IoError};

const SECTOR: usize = 512;
/// Where `backing_file_offset` and `backing_file_size` lie, next to each other.
const BACKING_FIELDS: usize = 8;

/// A layer below, as a header names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Label<'a> {
    pub(crate) name: &'a [u8],
    pub(crate) format: Format,
}

/// The writes that change a header.
#[derive(Debug, PartialEq, Eq)]
struct Plan {
    /// The name, where the first sector has no room for it; durable before the sector is written.
    name: Option<(u64, Vec<u8>)>,
    sector: Vec<u8>,
}

impl Qcow2 {
    /// Makes the header name another layer below, or none. Everything else is durable first.
    pub(crate) async fn relabel(&self, label: Option<Label<'_>>) -> Result<(), ErrorKind> {
        self.settle().await?;
        self.begin().await?;
        let length = self.geometry().cluster_size().min(self.file.end());
        let mut pages = Pages::zeroed(length as usize);
        let read = self.file.read(0, pages.span()).await;
        read.map_err(|e| IoError::host("read the header", 0, &e))?;
        let plan = plan(pages.bytes(), self.header.version, label).map_err(ErrorKind::Backing)?;
        if let Some((at, name)) = plan.name {
            self.write_bytes(at, &name, "write the backing file's name")
                .await?;
            self.sync().await?;
        }
        self.write_bytes(0, &plan.sector, "write the header")
            .await?;
        Ok(self.sync().await?)
    }
}

/// How the header in `old`, the first cluster, comes to name `label`. The error says why it cannot.
fn plan(old: &[u8], version: u32, label: Option<Label<'_>>) -> Result<Plan, String> {
    let mut sector = old.get(..SECTOR).ok_or("the header is cut short")?.to_vec();
    let Some(label) = label else {
        put(&mut sector, BACKING_FIELDS, &[0; 12]);
        return Ok(Plan { name: None, sector });
    };
    let limit = spec::MAX_BACKING_NAME as usize;
    if label.name.is_empty() || label.name.len() > limit || label.name.contains(&0) {
        let length = label.name.len();
        return Err(format!(
            "the backing file's name has {length} bytes; 1 to {limit} are allowed, none of them zero"
        ));
    }
    let start = match version {
        2 => HEADER_V2,
        _ => word(old, 100) as usize,
    };
    let old_name = name_place(old);
    let extensions = read_extensions(old, start, old_name.map_or(old.len(), |(at, _)| at))?;
    let end = |bytes: &[u8]| start + bytes.len();
    let mut written = write_extensions(&extensions, label.format, true);
    let unchanged_rest = |bytes: &[u8]| {
        let from = SECTOR.saturating_sub(start).min(bytes.len());
        old.get(start + from..end(bytes)) == bytes.get(from..)
    };
    if end(&written) > SECTOR && !unchanged_rest(&written) {
        written = write_extensions(&extensions, label.format, false);
        if end(&written) > SECTOR {
            return Err("the header's extensions reach past its first sector, so that the name below cannot be changed in one write".into());
        }
    }
    let inside = SECTOR.saturating_sub(start).min(written.len());
    put(
        &mut sector,
        start,
        written.get(..inside).unwrap_or_default(),
    );
    // What lay behind the old extensions in this sector means nothing any more, except for a name that stays until then.
    if let Some(rest) = sector.get_mut(start + inside..) {
        rest.fill(0);
    }
    let length = label.name.len();
    let free = end(&written);
    let (at, before) = if free + length <= SECTOR {
        put(&mut sector, free, label.name);
        (free, None)
    } else {
        let candidates = [
            Some(free.max(SECTOR)),
            old_name.map(|(at, size)| (at + size).next_multiple_of(8).max(free).max(SECTOR)),
        ];
        let overlaps = |at: usize| {
            old_name.is_some_and(|(old_at, size)| at < old_at + size && old_at < at + length)
        };
        let mut place = candidates.into_iter().flatten();
        let at = place
            .find(|at| at + length <= old.len() && !overlaps(*at))
            .ok_or("the first cluster has no room for the name of another backing file")?;
        (at, Some((at as u64, label.name.to_vec())))
    };
    put(&mut sector, BACKING_FIELDS, &(at as u64).to_be_bytes());
    put(
        &mut sector,
        BACKING_FIELDS + 8,
        &(length as u32).to_be_bytes(),
    );
    Ok(Plan {
        name: before,
        sector,
    })
}

/// Where the present name lies and how long it is.
fn name_place(header: &[u8]) -> Option<(usize, usize)> {
    let bytes = header.get(BACKING_FIELDS..)?.first_chunk()?;
    let at = usize::try_from(u64::from_be_bytes(*bytes)).ok()?;
    let size = word(header, BACKING_FIELDS + 8) as usize;
    (at != 0).then_some((at, size))
}

fn word(bytes: &[u8], at: usize) -> u32 {
    let bytes = bytes.get(at..).and_then(|rest| rest.first_chunk());
    bytes.map_or(0, |bytes| u32::from_be_bytes(*bytes))
}

fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    if let Some(place) = bytes.get_mut(at..at + value.len()) {
        place.copy_from_slice(value);
    }
}

/// The extensions from `start` on, in order: kind and data.
fn read_extensions(header: &[u8], start: usize, end: usize) -> Result<Vec<(u32, &[u8])>, String> {
    let mut extensions = Vec::new();
    let mut rest = header.get(start..end).unwrap_or_default();
    while let Ok((head, data)) = ExtensionHead::read_from_prefix(rest) {
        let kind = head.kind.get();
        if kind == extension::END {
            break;
        }
        let length = head.length.get() as usize;
        let body = data
            .get(..length)
            .ok_or("a header extension is cut short")?;
        extensions.push((kind, body));
        rest = data.get(length.next_multiple_of(8)..).unwrap_or_default();
    }
    Ok(extensions)
}

/// The bytes of the extensions, with the format of the layer below where it was, else first.
fn write_extensions(extensions: &[(u32, &[u8])], format: Format, names: bool) -> Vec<u8> {
    let format: &[u8] = match format {
        Format::Raw => b"raw",
        Format::Qcow2 => b"qcow2",
    };
    let mut bytes = Vec::new();
    let mut push = |kind: u32, data: &[u8]| {
        let head = ExtensionHead {
            kind: kind.into(),
            length: (data.len() as u32).into(),
        };
        bytes.extend_from_slice(head.as_bytes());
        bytes.extend_from_slice(data);
        bytes.resize(bytes.len().next_multiple_of(8), 0);
    };
    let known = |kind: u32| kind == extension::BACKING_FORMAT;
    if !extensions.iter().any(|(kind, _)| known(*kind)) {
        push(extension::BACKING_FORMAT, format);
    }
    for (kind, data) in extensions {
        match *kind {
            kind if known(kind) => push(kind, format),
            extension::FEATURE_NAMES if !names => {}
            kind => push(kind, data),
        }
    }
    push(extension::END, &[]);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A header with these extensions, and a name behind them or at `at`.
    fn header(
        cluster: usize,
        extensions: &[(u32, Vec<u8>)],
        name: Option<(usize, &[u8])>,
    ) -> Vec<u8> {
        let mut bytes = vec![0; cluster];
        put(&mut bytes, 100, &112u32.to_be_bytes());
        let mut at = 112;
        for (kind, data) in extensions {
            put(&mut bytes, at, &kind.to_be_bytes());
            put(&mut bytes, at + 4, &(data.len() as u32).to_be_bytes());
            put(&mut bytes, at + 8, data);
            at += 8 + data.len().next_multiple_of(8);
        }
        if let Some((at, name)) = name {
            put(&mut bytes, 8, &(at as u64).to_be_bytes());
            put(&mut bytes, 16, &(name.len() as u32).to_be_bytes());
            put(&mut bytes, at, name);
        }
        bytes
    }

    /// What a header says after every write of a plan, and that before the last one it says what it said.
    fn carried_out(old: &[u8], label: Label<'_>) -> (Vec<u8>, Vec<(u32, Vec<u8>)>) {
        let plan = plan(old, 3, Some(label)).unwrap();
        let mut bytes = old.to_vec();
        if let Some((at, name)) = plan.name {
            put(&mut bytes, at as usize, &name);
            assert_eq!(
                said(&bytes),
                said(old),
                "the old name is whole until the sector is written"
            );
        }
        bytes[..SECTOR].copy_from_slice(&plan.sector);
        said(&bytes)
    }

    fn said(bytes: &[u8]) -> (Vec<u8>, Vec<(u32, Vec<u8>)>) {
        let place = name_place(bytes);
        let (at, size) = place.unwrap_or((bytes.len(), 0));
        let extensions = read_extensions(bytes, 112, at).unwrap();
        (
            bytes[at..at + size].to_vec(),
            extensions
                .into_iter()
                .map(|(kind, data)| (kind, data.to_vec()))
                .collect(),
        )
    }

    const UNKNOWN: u32 = 0x1234_5678;

    #[test]
    fn a_new_name_keeps_every_extension_and_its_format_is_told() {
        let long = vec![b'n'; 600];
        for cluster in [512, 4096] {
            for old_name in [None, Some((200, &b"old.raw"[..]))] {
                let extensions = [
                    (extension::BACKING_FORMAT, b"raw".to_vec()),
                    (UNKNOWN, vec![7; 12]),
                ];
                let old = header(cluster, &extensions, old_name);
                let names: &[&[u8]] = if cluster == 512 {
                    &[b"new"]
                } else {
                    &[b"new", &long]
                };
                for name in names {
                    let label = Label {
                        name,
                        format: Format::Qcow2,
                    };
                    let (seen, kept) = carried_out(&old, label);
                    assert_eq!(seen, *name);
                    assert_eq!(
                        kept,
                        [
                            (extension::BACKING_FORMAT, b"qcow2".to_vec()),
                            (UNKNOWN, vec![7; 12])
                        ]
                    );
                }
            }
        }
    }

    #[test]
    fn a_long_table_of_feature_names_stays_where_it_need_not_move_and_goes_where_it_must() {
        let table = (extension::FEATURE_NAMES, vec![1; 384]);
        let with_format = [(extension::BACKING_FORMAT, b"raw".to_vec()), table.clone()];
        let old = header(4096, &with_format, Some((600, b"old")));
        let label = Label {
            name: b"new",
            format: Format::Qcow2,
        };
        assert_eq!(carried_out(&old, label).1.len(), 2);
        let old = header(4096, &[table], None);
        let (name, kept) = carried_out(&old, label);
        assert_eq!((name, kept.len()), (b"new".to_vec(), 1));
    }

    #[test]
    fn what_does_not_fit_is_refused_and_nothing_is_lost() {
        let old = header(4096, &[(UNKNOWN, vec![1; 500])], None);
        let label = Label {
            name: b"new",
            format: Format::Raw,
        };
        assert!(
            plan(&old, 3, Some(label))
                .unwrap_err()
                .contains("first sector")
        );
        let old = header(512, &[], Some((150, &[b'o'; 300])));
        let name = [b'n'; 400];
        let label = Label {
            name: &name,
            format: Format::Raw,
        };
        assert!(plan(&old, 3, Some(label)).unwrap_err().contains("no room"));
        let label = Label {
            name: b"",
            format: Format::Raw,
        };
        assert!(plan(&old, 3, Some(label)).is_err());
    }

    #[test]
    fn no_name_at_all_is_twelve_zero_bytes() {
        let old = header(4096, &[(UNKNOWN, vec![1; 8])], Some((600, b"old")));
        let plan = plan(&old, 3, None).unwrap();
        assert_eq!(plan.sector[8..20], [0; 12]);
        assert_eq!(plan.sector[20..], old[20..512]);
    }
}
