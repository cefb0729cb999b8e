//! An image made sound again: its refcounts rebuilt from what refers to its clusters, and whatever follows from them.
//!
//! ```text
//!  | header ──> refcounts, wrong | … | data … | end          1  new refcounts behind everything in use, durable
//!  | header ───────────────────────────────────────> new |   2  the header points to them: one write of one sector
//!                                                            3  COPIED flags, the marks in the header
//!                                                            4  what nothing refers to is given back to the host
//! ```
//!
//! Nothing that is in use is moved or overwritten, so that the image is never worse than before, wherever the job dies; it is done
//! again then. What cannot be repaired is an entry that points nowhere: what it meant is lost, and it is left for a person to see.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;

use serde::Serialize;

use super::check::{CheckReport, Walk};
use crate::buffers::Pages;
use crate::error::{Error, ErrorKind};
use crate::io::BlockFile;
use crate::lock::Access;
use crate::qcow2::header::{Header, TableAt};
use crate::qcow2::read_header;
use crate::qcow2::spec::{
    self, COPIED, Geometry, Incompatible, OFFSET_MASK, RawEntry, Reference, put_refcount,
};
use crate::{Cache, Format, task};

/// What may be repaired.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repair {
    /// Lost space only.
    Leaks,
    /// Lost space and contradictions.
    All,
}

/// What a repair found and left.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RepairReport {
    /// What was found.
    pub before: CheckReport,
    /// What there is now.
    pub after: CheckReport,
    /// Whether the image was changed.
    pub changed: bool,
}

/// Repairs the qcow2 image at `path`, which nobody else uses.
///
/// # Errors
/// The file is not a qcow2 image or its header is damaged, it is in use, it has contradictions and only leaks may be repaired, or it
/// has no room.
pub fn repair(path: &Path, format: Format, what: Repair) -> Result<RepairReport, Error> {
    if format == Format::Raw {
        let what = "repair of a raw image: it has nothing that could be wrong";
        return Err(Error::new(path, ErrorKind::Unsupported(what.into())));
    }
    let file = BlockFile::open(path, Cache::Buffered, true)?;
    file.lock(Access::Write)?;
    let header = read_header(&file)?;
    let before = check(&file, &header)?;
    let marks = header.incompatible & (Incompatible::DIRTY | Incompatible::CORRUPT);
    if before.is_clean() && marks.is_empty() {
        return Ok(RepairReport {
            after: before.clone(),
            before,
            changed: false,
        });
    }
    if what == Repair::Leaks && (before.corruptions > 0 || !marks.is_empty()) {
        let errors = before.corruptions;
        let reason = format!(
            "it has {errors} errors or is marked as damaged, and leaks alone cannot be told then: repair all of it (--all)"
        );
        return Err(Error::new(path, ErrorKind::NotWritable(reason)));
    }
    let job = Job {
        file: &file,
        header: &header,
    };
    job.run(&before)?;
    let header = read_header(&file)?;
    let after = check(&file, &header)?;
    if header.version >= 3 {
        let mut features = header.incompatible - Incompatible::DIRTY;
        if after.corruptions == 0 {
            features -= Incompatible::CORRUPT;
        }
        job.write(
            spec::field::INCOMPATIBLE_FEATURES,
            &features.bits().to_be_bytes(),
        )?;
    }
    job.sync()?;
    Ok(RepairReport {
        before,
        after,
        changed: true,
    })
}

fn check(file: &BlockFile, header: &Header) -> Result<CheckReport, Error> {
    let mut walk = Walk::new(file, header.geometry);
    walk.run(header)?;
    Ok(walk.report)
}

struct Job<'a> {
    file: &'a BlockFile,
    header: &'a Header,
}

/// Where the new refcounts go.
struct Layout {
    /// Cluster of the table; the blocks follow it.
    start: u64,
    table_clusters: u64,
    /// Which blocks there are, by their index in the table.
    blocks: Vec<u64>,
}

impl Layout {
    fn end(&self) -> u64 {
        self.start + self.table_clusters + self.blocks.len() as u64
    }
}

impl Job<'_> {
    fn run(&self, before: &CheckReport) -> Result<(), Error> {
        let mut walk = Walk::new(self.file, self.header.geometry);
        walk.count(self.header)?;
        // Where a table cannot be read, what it referred to looks as if nobody needed it.
        let complete = walk.report.corruptions == 0;
        let mut references = std::mem::take(&mut walk.references);
        walk.count_refcounts(self.header)?;
        let old = walk.references;
        let clusters = |end: u64| end.div_ceil(self.header.geometry.cluster_size());
        let past = |counts: &HashMap<u64, u64>| counts.keys().max().map_or(0, |last| last + 1);
        let mut start = past(&references).max(past(&old));
        if !complete {
            start = start.max(clusters(self.file.end()));
        }
        let layout = self.layout(&references, start)?;
        for cluster in layout.start..layout.end() {
            references.insert(cluster, 1);
        }
        self.check_width(&references)?;
        self.write_refcounts(&layout, &references)?;
        self.switch(&layout)?;
        if before.corruptions > 0 {
            self.fix_flags(&references)?;
            self.sync()?;
        }
        if complete {
            self.give_back(&layout, &references)?;
        }
        Ok(())
    }

    fn full(&self, reason: String) -> Error {
        Error::new(self.file.path(), ErrorKind::Size(reason))
    }

    /// Table and blocks count themselves: goes on until they are enough for all.
    fn layout(&self, references: &HashMap<u64, u64>, start: u64) -> Result<Layout, Error> {
        let geometry = self.header.geometry;
        let bits = geometry.refcount_block_bits();
        let mut blocks: BTreeSet<u64> = references.keys().map(|cluster| cluster >> bits).collect();
        let mut table_clusters = 1;
        loop {
            let end = start + table_clusters + blocks.len() as u64;
            let before = (blocks.len(), table_clusters);
            blocks.extend((start >> bits)..=((end - 1) >> bits));
            let entries = blocks.last().map_or(0, |last| last + 1);
            if entries * 8 > spec::MAX_REFCOUNT_TABLE_BYTES {
                let reason = "something in it points so far past its end that no refcount table reaches there";
                return Err(self.full(reason.into()));
            }
            table_clusters = (entries * 8).div_ceil(geometry.cluster_size());
            if (blocks.len(), table_clusters) == before {
                break;
            }
        }
        let layout = Layout {
            start,
            table_clusters,
            blocks: blocks.into_iter().collect(),
        };
        if self.file.is_device() && layout.end() << geometry.cluster_bits > self.file.end() {
            let reason = "its device has no room behind the clusters in use for new refcounts: make the device larger";
            return Err(self.full(reason.into()));
        }
        Ok(layout)
    }

    fn check_width(&self, references: &HashMap<u64, u64>) -> Result<(), Error> {
        let geometry = self.header.geometry;
        let most = u64::MAX >> (64 - (1 << geometry.refcount_order));
        let Some((cluster, count)) = references.iter().find(|(_, count)| **count > most) else {
            return Ok(());
        };
        let host = cluster << geometry.cluster_bits;
        let bits = 1 << geometry.refcount_order;
        Err(self.full(format!(
            "the cluster at {host:#x} has {count} references, more than refcounts of {bits} bits can count: convert it to a new image"
        )))
    }

    /// Writes table and blocks, durably; nothing points at them yet.
    fn write_refcounts(
        &self,
        layout: &Layout,
        references: &HashMap<u64, u64>,
    ) -> Result<(), Error> {
        let geometry = self.header.geometry;
        let bits = geometry.refcount_block_bits();
        let cluster = geometry.cluster_size();
        let mut by_block: BTreeMap<u64, Vec<(usize, u64)>> = BTreeMap::new();
        for (number, count) in references {
            let entry = (number & ((1 << bits) - 1)) as usize;
            by_block
                .entry(number >> bits)
                .or_default()
                .push((entry, *count));
        }
        let mut table = vec![0; (layout.table_clusters * cluster) as usize];
        let first = layout.start + layout.table_clusters;
        for (n, index) in (0..).zip(&layout.blocks) {
            let host = (first + n) << geometry.cluster_bits;
            let mut block = vec![0; cluster as usize];
            for (entry, count) in by_block.get(index).into_iter().flatten() {
                put_refcount(&mut block, geometry.refcount_order, *entry, *count);
            }
            self.write(host, &block)?;
            if let Some(entry) = table.get_mut(*index as usize * 8..*index as usize * 8 + 8) {
                entry.copy_from_slice(&host.to_be_bytes());
            }
        }
        self.write(layout.start << geometry.cluster_bits, &table)?;
        self.sync()
    }

    /// Points the header at the new table: offset and size in one write within one sector.
    fn switch(&self, layout: &Layout) -> Result<(), Error> {
        let host = layout.start << self.header.geometry.cluster_bits;
        let mut fields = host.to_be_bytes().to_vec();
        fields.extend((layout.table_clusters as u32).to_be_bytes());
        self.write(spec::field::REFCOUNT_TABLE_OFFSET, &fields)?;
        self.sync()
    }

    /// Makes COPIED say in the active tables what the refcounts say.
    fn fix_flags(&self, references: &HashMap<u64, u64>) -> Result<(), Error> {
        let geometry = self.header.geometry;
        let single = |host: u64| references.get(&geometry.cluster(host)) == Some(&1);
        let l1 = self.header.l1;
        let mut tables = BTreeSet::new();
        self.rewrite(l1, |entry| {
            let table = entry.entry & OFFSET_MASK;
            if table == 0 || geometry.in_cluster(table) != 0 || table >= self.file.end() {
                return entry.entry;
            }
            tables.insert(table);
            flagged(entry.entry, single(table))
        })?;
        for offset in tables {
            let entries = geometry.table_entries();
            self.rewrite(TableAt { offset, entries }, |raw| {
                match raw.reference(geometry, self.header.version) {
                    Ok(Reference::Cluster { host, .. }) => flagged(raw.entry, single(host)),
                    Ok(Reference::Compressed { .. }) => raw.entry & !COPIED,
                    _ => raw.entry,
                }
            })?;
        }
        Ok(())
    }

    /// Writes a table again if `change` makes other first words of its entries. It is changed in place, entry by entry whole.
    fn rewrite(&self, at: TableAt, mut change: impl FnMut(RawEntry) -> u64) -> Result<(), Error> {
        let mut pages = self.read(at.offset, at.entries * 8)?;
        let is_l1 = at == self.header.l1;
        let geometry = Geometry {
            extended_l2: self.header.geometry.extended_l2 && !is_l1,
            ..self.header.geometry
        };
        let mut changed = false;
        let size = geometry.l2_entry_bytes() as usize;
        for bytes in pages.bytes_mut().chunks_exact_mut(size) {
            let raw = RawEntry::read(bytes, geometry);
            let entry = change(raw);
            if entry != raw.entry {
                RawEntry { entry, ..raw }.write(bytes);
                changed = true;
            }
        }
        match changed {
            true => self.write(at.offset, pages.bytes()),
            false => Ok(()),
        }
    }

    /// Returns to the host what nothing refers to.
    fn give_back(&self, layout: &Layout, references: &HashMap<u64, u64>) -> Result<(), Error> {
        let bits = self.header.geometry.cluster_bits;
        let path = self.file.path();
        let mut used: Vec<u64> = references.keys().copied().collect();
        used.sort_unstable();
        let mut free_from = 0;
        for cluster in used {
            if cluster > free_from {
                let (at, length) = (free_from << bits, (cluster - free_from) << bits);
                let end = self.file.end();
                if at < end {
                    task::complete(self.file.punch(at, length.min(end - at)))
                        .map_err(|e| Error::io(path, "punch a hole into it", e))?;
                }
            }
            free_from = cluster + 1;
        }
        let end = layout.end().max(free_from) << bits;
        if !self.file.is_device() && end < self.file.end() {
            self.file
                .set_end(end)
                .map_err(|e| Error::io(path, "cut off its unused end", e))?;
        }
        self.sync()
    }

    fn read(&self, at: u64, bytes: u64) -> Result<Pages, Error> {
        let mut pages = Pages::zeroed(bytes as usize);
        task::complete(self.file.read(at, pages.span()))
            .map_err(|e| Error::io(self.file.path(), "read its tables", e))?;
        Ok(pages)
    }

    fn write(&self, at: u64, bytes: &[u8]) -> Result<(), Error> {
        let mut pages = Pages::zeroed(bytes.len());
        pages.bytes_mut().copy_from_slice(bytes);
        task::complete(self.file.write(at, pages.span()))
            .map_err(|e| Error::io(self.file.path(), "write its tables", e))
    }

    fn sync(&self) -> Result<(), Error> {
        task::complete(self.file.sync())
            .map_err(|e| Error::io(self.file.path(), "make it durable", e))
    }
}

fn flagged(entry: u64, copied: bool) -> u64 {
    if copied {
        entry | COPIED
    } else {
        entry & !COPIED
    }
}
