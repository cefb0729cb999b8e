//! Whether an image is sound: every cluster's references counted and compared with its refcount.
//!
//! The walk shares the layouts with the engine and nothing else, so that one can find the other's mistakes.
//!
//! | found | means |
//! |---|---|
//! | refcount > references | a leak: space lost until repaired, data unharmed |
//! | refcount < references | corruption: the next allocation may overwrite data |
//! | COPIED flag or offset wrong in an active table | corruption |

use std::collections::HashMap;
use std::path::Path;

use serde::Serialize;
use zerocopy::FromBytes;

use crate::buffers::Pages;
use crate::error::{Error, ErrorKind};
use crate::io::BlockFile;
use crate::lock::Access;
use crate::qcow2::header::{Header, TableAt};
use crate::qcow2::spec::{
    self, BitmapHead, COPIED, Geometry, OFFSET_MASK, RawEntry, Reference, get_refcount,
};
use crate::qcow2::{be_entries, load_snapshots, read_header};
use crate::{Cache, Format, task};

/// What a check found.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct CheckReport {
    /// Clusters that are counted but not used: lost space, nothing worse.
    pub leaks: u64,
    /// Places where the image contradicts itself in a way that endangers data.
    pub corruptions: u64,
    /// The first findings in words.
    pub findings: Vec<String>,
    /// Clusters of guest data in the active disk, compressed ones included.
    pub allocated_clusters: u64,
    /// Of those, the compressed.
    pub compressed_clusters: u64,
    /// Clusters of the disk.
    pub total_clusters: u64,
}

impl CheckReport {
    /// Whether nothing was found at all.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.leaks == 0 && self.corruptions == 0
    }

    fn corruption(&mut self, what: String) {
        self.corruptions += 1;
        self.note(what);
    }

    fn note(&mut self, what: String) {
        if self.findings.len() < MAX_FINDINGS {
            self.findings.push(what);
        }
    }
}

/// Findings kept in words; the rest are only counted.
const MAX_FINDINGS: usize = 100;

/// Checks the image at `path`, which is stated to be of `format`, without changing it. Of a raw image there is nothing to check.
///
/// # Errors
/// The file cannot be read, is being written by someone else, or its header is not that of an image.
pub fn check(path: &Path, format: Format) -> Result<CheckReport, Error> {
    let file = BlockFile::open(path, Cache::Buffered, false)?;
    file.lock(Access::Read)?;
    if format == Format::Raw {
        return Ok(CheckReport::default());
    }
    let header = read_header(&file)?;
    let mut walk = Walk::new(&file, header.geometry);
    walk.run(&header)?;
    Ok(walk.report)
}

/// The references to every host cluster of an image whose refcounts are not to be believed.
///
/// # Errors
/// The image contradicts itself elsewhere too, or cannot be read.
pub(crate) fn references(file: &BlockFile, header: &Header) -> Result<HashMap<u64, u64>, Error> {
    let mut walk = Walk::new(file, header.geometry);
    walk.count(header)?;
    if let Some(finding) = walk.report.findings.first() {
        let reason = format!("{finding}; repair it with `qemu-img check -r all`");
        return Err(Error::new(file.path(), ErrorKind::NotWritable(reason)));
    }
    Ok(walk.references)
}

struct Walk<'a> {
    file: &'a BlockFile,
    geometry: Geometry,
    /// References by host cluster.
    references: HashMap<u64, u64>,
    /// The refcount table.
    refcount_blocks: Vec<u64>,
    report: CheckReport,
}

/// The refcount block looked at last.
#[derive(Default)]
struct BlockCache {
    index: Option<u64>,
    bytes: Vec<u8>,
}

/// Whether a table belongs to the disk or to an internal snapshot of it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Owner {
    Active,
    Snapshot,
}

impl<'a> Walk<'a> {
    fn new(file: &'a BlockFile, geometry: Geometry) -> Self {
        Self {
            file,
            geometry,
            references: HashMap::new(),
            refcount_blocks: Vec::new(),
            report: CheckReport::default(),
        }
    }

    fn run(&mut self, header: &Header) -> Result<(), Error> {
        self.count(header)?;
        self.compare()?;
        // Exactness of the COPIED flag depends on refcounts, which are known to be readable only now.
        self.check_copied(header)
    }

    /// Counts all references.
    fn count(&mut self, header: &Header) -> Result<(), Error> {
        let cluster = self.geometry.cluster_size();
        self.report.total_clusters = header.size.div_ceil(cluster);
        self.refer(0, cluster, "the header");
        self.refer(
            header.refcount_table.offset,
            header.refcount_table.entries * 8,
            "the refcount table",
        );
        self.refcount_blocks = self.entries(header.refcount_table)?;
        self.walk_l1(header, header.l1, Owner::Active)?;
        let (snapshots, length) = load_snapshots(self.file, header)?;
        self.refer(header.snapshots_offset, length, "the snapshot table");
        for snapshot in snapshots {
            self.walk_l1(header, snapshot.l1, Owner::Snapshot)?;
        }
        self.walk_bitmaps(header)?;
        for block in self.refcount_blocks.clone() {
            let block = block & spec::REFCOUNT_OFFSET_MASK;
            if block != 0 && self.is_sound(block, "a refcount block") {
                self.refer(block, cluster, "a refcount block");
            }
        }
        Ok(())
    }

    /// Counts a reference to every cluster that `bytes` bytes at `host` touch.
    fn refer(&mut self, host: u64, bytes: u64, what: &str) {
        if bytes == 0 {
            return;
        }
        let Some(end) = host
            .checked_add(bytes)
            .filter(|end| *end <= spec::HOST_LIMIT)
        else {
            self.report
                .corruption(format!("{what} at {host:#x} is out of reach"));
            return;
        };
        for cluster in self.geometry.cluster(host)..=self.geometry.cluster(end - 1) {
            let count = self.references.entry(cluster).or_default();
            *count = count.saturating_add(1);
        }
    }

    /// Whether a host offset can be a cluster's.
    fn is_sound(&mut self, host: u64, what: &str) -> bool {
        if self.geometry.in_cluster(host) != 0 {
            self.report
                .corruption(format!("{what} at {host:#x} is not at a cluster's start"));
            return false;
        }
        if host >= self.file.end() {
            self.report
                .corruption(format!("{what} at {host:#x} lies past the end of the file"));
            return false;
        }
        true
    }

    /// The entries of a table, without those past the end of the file, which are zero: a short file that names long tables is not
    /// worth long work.
    fn entries(&self, at: TableAt) -> Result<Vec<u64>, Error> {
        let there = self
            .file
            .end()
            .saturating_sub(at.offset)
            .next_multiple_of(8);
        let length = (at.entries * 8).min(there);
        Ok(be_entries(self.read(at.offset, length)?.bytes()).collect())
    }

    fn read(&self, at: u64, bytes: u64) -> Result<Pages, Error> {
        let path = self.file.path();
        let bytes = usize::try_from(bytes).map_err(|_| {
            Error::new(
                path,
                ErrorKind::Size("a table does not fit in memory".into()),
            )
        })?;
        let mut pages = Pages::zeroed(bytes);
        task::complete(self.file.read(at, pages.span()))
            .map_err(|e| Error::io(path, "read its tables", e))?;
        Ok(pages)
    }

    fn walk_l1(&mut self, header: &Header, l1: TableAt, owner: Owner) -> Result<(), Error> {
        self.refer(l1.offset, l1.entries * 8, "an L1 table");
        for entry in self.entries(l1)? {
            if entry & spec::L1_RESERVED != 0 {
                self.report
                    .corruption(format!("an L1 entry has reserved bits set: {entry:#x}"));
            }
            let table = entry & OFFSET_MASK;
            if table == 0 || !self.is_sound(table, "an L2 table") {
                continue;
            }
            self.refer(table, self.geometry.cluster_size(), "an L2 table");
            for raw in self.l2_entries(table)? {
                self.walk_l2_entry(header, raw, owner);
            }
        }
        Ok(())
    }

    fn walk_l2_entry(&mut self, header: &Header, raw: RawEntry, owner: Owner) {
        let active = u64::from(owner == Owner::Active);
        let entry = raw.entry;
        if entry & spec::COMPRESSED == 0 && entry & spec::L2_RESERVED != 0 {
            self.report
                .corruption(format!("an L2 entry has reserved bits set: {entry:#x}"));
        }
        match raw.reference(self.geometry, header.version) {
            Ok(Reference::Nothing) => {}
            Ok(Reference::Cluster { host, .. }) => {
                self.report.allocated_clusters += active;
                self.refer(host, self.geometry.cluster_size(), "guest data");
            }
            Ok(Reference::Compressed { host, bytes }) => {
                self.report.allocated_clusters += active;
                self.report.compressed_clusters += active;
                if entry & COPIED != 0 {
                    self.report
                        .corruption(format!("compressed data at {host:#x} is marked COPIED"));
                }
                self.refer(host, bytes, "compressed data");
            }
            Err(reason) => self.report.corruption(format!("{reason}: {entry:#x}")),
        }
    }

    /// The entries of the L2 table at `host`.
    fn l2_entries(&self, host: u64) -> Result<Vec<RawEntry>, Error> {
        let table = self.read(host, self.geometry.cluster_size())?;
        let size = self.geometry.l2_entry_bytes() as usize;
        let entries = table.bytes().chunks_exact(size);
        Ok(entries
            .map(|bytes| RawEntry::read(bytes, self.geometry))
            .collect())
    }

    /// Persistent bitmaps take clusters as well.
    fn walk_bitmaps(&mut self, header: &Header) -> Result<(), Error> {
        let Some(bitmaps) = header.bitmaps.filter(|_| header.autoclear & 1 != 0) else {
            return Ok(());
        };
        let size = bitmaps
            .directory_size
            .get()
            .min(spec::MAX_SNAPSHOT_TABLE_BYTES);
        let offset = bitmaps.directory_offset.get();
        self.refer(offset, size, "the bitmap directory");
        let directory = self.read(offset, size)?;
        let mut rest = directory.bytes();
        for _ in 0..bitmaps.nb_bitmaps.get() {
            let Ok((head, tail)) = BitmapHead::read_from_prefix(rest) else {
                self.report
                    .corruption("the bitmap directory is cut short".into());
                break;
            };
            let at = TableAt {
                offset: head.table_offset.get(),
                entries: head.table_size.get().into(),
            };
            if at.entries * 8 > spec::MAX_L1_BYTES {
                self.report.corruption("a bitmap's table cannot be".into());
                break;
            }
            self.refer(at.offset, at.entries * 8, "a bitmap table");
            for entry in self.entries(at)? {
                let host = entry & OFFSET_MASK;
                if host != 0 {
                    self.refer(host, self.geometry.cluster_size(), "a bitmap");
                }
            }
            let length = head.extra_data_size.get() as usize + usize::from(head.name_size.get());
            let whole = (size_of::<BitmapHead>() + length).next_multiple_of(8);
            rest = tail
                .get(whole - size_of::<BitmapHead>()..)
                .unwrap_or_default();
        }
        Ok(())
    }

    /// Compares references with refcounts.
    fn compare(&mut self) -> Result<(), Error> {
        let mut cache = BlockCache::default();
        // Past the end of the file no space is lost.
        let end = self.file.end().div_ceil(self.geometry.cluster_size());
        for cluster in 0..end {
            let refcount = self.refcount(&mut cache, cluster)?;
            if refcount == 0 {
                continue;
            }
            let references = self.references.get(&cluster).copied().unwrap_or(0);
            if refcount > references {
                self.report.leaks += 1;
                let host = cluster << self.geometry.cluster_bits;
                self.report.note(format!(
                    "leak: the cluster at {host:#x} has refcount {refcount} and {references} references"
                ));
            }
        }
        let mut used: Vec<(u64, u64)> = self.references.iter().map(|(c, n)| (*c, *n)).collect();
        used.sort_unstable();
        for (cluster, references) in used {
            let refcount = self.refcount(&mut cache, cluster)?;
            if refcount < references {
                let host = cluster << self.geometry.cluster_bits;
                self.report.corruption(format!(
                    "the cluster at {host:#x} has refcount {refcount} and {references} references"
                ));
            }
        }
        Ok(())
    }

    /// The refcount of a cluster; 0 where the table names no block that can be.
    fn refcount(&self, cache: &mut BlockCache, cluster: u64) -> Result<u64, Error> {
        let bits = self.geometry.refcount_block_bits();
        let index = cluster >> bits;
        if cache.index != Some(index) {
            let block = usize::try_from(index)
                .ok()
                .and_then(|n| self.refcount_blocks.get(n));
            let block = block.map_or(0, |block| block & spec::REFCOUNT_OFFSET_MASK);
            let sound =
                block != 0 && self.geometry.in_cluster(block) == 0 && block < self.file.end();
            cache.bytes = match sound {
                true => self
                    .read(block, self.geometry.cluster_size())?
                    .bytes()
                    .to_vec(),
                false => Vec::new(),
            };
            cache.index = Some(index);
        }
        let n = (cluster & ((1 << bits) - 1)) as usize;
        Ok(get_refcount(&cache.bytes, self.geometry.refcount_order, n).unwrap_or(0))
    }

    /// COPIED must say exactly whether a refcount is one, in the active tables.
    fn check_copied(&mut self, header: &Header) -> Result<(), Error> {
        let mut cache = BlockCache::default();
        for entry in self.entries(header.l1)? {
            let table = entry & OFFSET_MASK;
            if table == 0 || self.geometry.in_cluster(table) != 0 || table >= self.file.end() {
                continue;
            }
            self.compare_copied(&mut cache, table, entry, "an L2 table")?;
            for raw in self.l2_entries(table)? {
                if let Ok(Reference::Cluster { host, .. }) =
                    raw.reference(self.geometry, header.version)
                {
                    self.compare_copied(&mut cache, host, raw.entry, "guest data")?;
                }
            }
        }
        Ok(())
    }

    fn compare_copied(
        &mut self,
        cache: &mut BlockCache,
        host: u64,
        raw: u64,
        what: &str,
    ) -> Result<(), Error> {
        let refcount = self.refcount(cache, self.geometry.cluster(host))?;
        if (raw & COPIED != 0) != (refcount == 1) {
            let flag = if raw & COPIED != 0 {
                "marked"
            } else {
                "not marked"
            };
            self.report.corruption(format!(
                "{what} at {host:#x} is {flag} COPIED and has refcount {refcount}"
            ));
        }
        Ok(())
    }
}
