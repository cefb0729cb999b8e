//! Whether an image is sound: every cluster's references counted and compared with its refcount.
//!
//! The walk shares the layouts with the engine and nothing else, so that one can find the other's mistakes.
//!
//! | found | means |
//! |---|---|
//! | refcount > references | a leak: space lost until repaired, data unharmed |
//! | refcount < references | corruption: the next allocation may overwrite data |
//! | COPIED flag or offset wrong in an active table | corruption |

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;

use rustix::fs::SeekFrom;
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
    /// Bytes of the file up to the last cluster in use.
    pub image_end_bytes: u64,
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
    walk.count_refcounts(header)?;
    if let Some(finding) = walk.report.findings.first() {
        let reason = format!("{finding}; repair it with `drover image repair --all`");
        return Err(Error::new(file.path(), ErrorKind::NotWritable(reason)));
    }
    Ok(walk.references)
}

/// A way through all tables of an image. Each table is looked at once, however often it is referred to, so that the time it takes
/// goes with the size of the file and not with what the file claims.
pub(super) struct Walk<'a> {
    file: &'a BlockFile,
    geometry: Geometry,
    /// References by host cluster.
    pub(super) references: HashMap<u64, u64>,
    /// L2 tables by where they are.
    tables: BTreeMap<u64, Uses>,
    /// The refcount table.
    refcount_blocks: Vec<u64>,
    pub(super) report: CheckReport,
}

/// How often an L2 table is referred to.
#[derive(Clone, Copy, Default)]
struct Uses {
    active: u64,
    snapshots: u64,
}

/// The refcount block looked at last.
#[derive(Default)]
struct BlockCache {
    at: Option<u64>,
    bytes: Vec<u8>,
}

/// Whether a table belongs to the disk or to an internal snapshot of it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Owner {
    Active,
    Snapshot,
}

impl<'a> Walk<'a> {
    pub(super) fn new(file: &'a BlockFile, geometry: Geometry) -> Self {
        Self {
            file,
            geometry,
            references: HashMap::new(),
            tables: BTreeMap::new(),
            refcount_blocks: Vec::new(),
            report: CheckReport::default(),
        }
    }

    pub(super) fn run(&mut self, header: &Header) -> Result<(), Error> {
        self.count(header)?;
        self.count_refcounts(header)?;
        self.compare()?;
        // Exactness of the COPIED flag depends on refcounts, which are known to be readable only now.
        self.check_copied(header)
    }

    /// Counts all references but those of the refcounts to themselves.
    pub(super) fn count(&mut self, header: &Header) -> Result<(), Error> {
        let cluster = self.geometry.cluster_size();
        self.report.total_clusters = header.size.div_ceil(cluster);
        self.refer(0, cluster, 1, "the header");
        self.walk_l1(header.l1, Owner::Active)?;
        let (snapshots, length) = load_snapshots(self.file, header)?;
        self.refer(header.snapshots_offset, length, 1, "the snapshot table");
        for snapshot in snapshots {
            self.walk_l1(snapshot.l1, Owner::Snapshot)?;
        }
        for (table, uses) in std::mem::take(&mut self.tables) {
            let times = uses.active + uses.snapshots;
            self.refer(table, cluster, times, "an L2 table");
            for (at, raw) in self.l2_entries(table)? {
                self.walk_l2_entry(header, at, raw, uses);
            }
        }
        self.walk_bitmaps(header)
    }

    /// Counts the references of the refcount table and to its blocks.
    pub(super) fn count_refcounts(&mut self, header: &Header) -> Result<(), Error> {
        let cluster = self.geometry.cluster_size();
        let table = header.refcount_table;
        self.refer(table.offset, table.entries * 8, 1, "the refcount table");
        self.refcount_blocks = self.entries(table)?;
        for block in self.refcount_blocks.clone() {
            let block = block & spec::REFCOUNT_OFFSET_MASK;
            if block != 0 && self.is_sound(block, "a refcount block") {
                self.refer(block, cluster, 1, "a refcount block");
            }
        }
        Ok(())
    }

    /// Counts so many references to every cluster that `bytes` bytes at `host` touch.
    fn refer(&mut self, host: u64, bytes: u64, times: u64, what: &str) {
        if bytes == 0 || times == 0 {
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
        // The file may end in the midst of its last cluster, and no earlier: what is not there needs no refcounts.
        if end.saturating_sub(self.file.end()) >= self.geometry.cluster_size() {
            self.report
                .corruption(format!("{what} at {host:#x} lies past the end of the file"));
            return;
        }
        for cluster in self.geometry.cluster(host)..=self.geometry.cluster(end - 1) {
            let count = self.references.entry(cluster).or_default();
            *count = count.saturating_add(times);
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

    /// Whether the host's file has nothing in a range: it reads as zero, and need not be read.
    fn is_hole(&self, at: u64, bytes: u64) -> bool {
        let data = rustix::fs::seek(self.file.fd(), SeekFrom::Data(at));
        match data {
            Ok(data) => data >= at.saturating_add(bytes),
            Err(errno) => errno == rustix::io::Errno::NXIO,
        }
    }

    fn walk_l1(&mut self, l1: TableAt, owner: Owner) -> Result<(), Error> {
        self.refer(l1.offset, l1.entries * 8, 1, "an L1 table");
        for (n, entry) in (0..).zip(self.entries(l1)?) {
            let at = l1.offset + n * 8;
            if entry & spec::L1_RESERVED != 0 {
                self.report.corruption(format!(
                    "the L1 entry at {at:#x} has reserved bits set: {entry:#x}"
                ));
            }
            let table = entry & OFFSET_MASK;
            if table == 0 || !self.is_sound(table, "an L2 table") {
                continue;
            }
            let uses = self.tables.entry(table).or_default();
            match owner {
                Owner::Active => uses.active += 1,
                Owner::Snapshot => uses.snapshots += 1,
            }
        }
        Ok(())
    }

    fn walk_l2_entry(&mut self, header: &Header, at: u64, raw: RawEntry, uses: Uses) {
        let entry = raw.entry;
        let times = uses.active + uses.snapshots;
        if entry & spec::COMPRESSED == 0 && entry & spec::L2_RESERVED != 0 {
            self.report.corruption(format!(
                "the L2 entry at {at:#x} has reserved bits set: {entry:#x}"
            ));
        }
        match raw.reference(self.geometry, header.version) {
            Ok(Reference::Nothing) => {}
            Ok(Reference::Cluster { host, .. }) => {
                self.report.allocated_clusters += uses.active;
                self.refer(host, self.geometry.cluster_size(), times, "guest data");
            }
            Ok(Reference::Compressed { host, bytes }) => {
                self.report.allocated_clusters += uses.active;
                self.report.compressed_clusters += uses.active;
                if entry & COPIED != 0 {
                    self.report.corruption(format!(
                        "the L2 entry at {at:#x} marks compressed data as COPIED"
                    ));
                }
                self.refer(host, bytes, times, "compressed data");
            }
            Err(reason) => self
                .report
                .corruption(format!("{reason}: {entry:#x} at {at:#x}")),
        }
    }

    /// The entries of the L2 table at `host`, with where each is.
    fn l2_entries(&self, host: u64) -> Result<Vec<(u64, RawEntry)>, Error> {
        if self.is_hole(host, self.geometry.cluster_size()) {
            return Ok(Vec::new());
        }
        let table = self.read(host, self.geometry.cluster_size())?;
        let size = self.geometry.l2_entry_bytes();
        let entries = table.bytes().chunks_exact(size as usize);
        Ok((0..)
            .zip(entries)
            .map(|(n, bytes)| (host + n * size, RawEntry::read(bytes, self.geometry)))
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
        self.refer(offset, size, 1, "the bitmap directory");
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
            self.refer(at.offset, at.entries * 8, 1, "a bitmap table");
            for entry in self.entries(at)? {
                let host = entry & OFFSET_MASK;
                if host != 0 {
                    self.refer(host, self.geometry.cluster_size(), 1, "a bitmap");
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
        let bits = self.geometry.refcount_block_bits();
        let mut seen = HashSet::new();
        for (index, block) in (0u64..).zip(self.refcount_blocks.clone()) {
            let Some(block) = self.sound_block(block).filter(|block| seen.insert(*block)) else {
                continue;
            };
            if index << bits >= end {
                break;
            }
            self.load_block(&mut cache, block)?;
            // Eight bytes of zeros are skipped as one: most of a block is.
            let order = self.geometry.refcount_order;
            for n in nonzero_entries(&cache.bytes, order) {
                let cluster = (index << bits) + n as u64;
                let refcount = get_refcount(&cache.bytes, order, n).unwrap_or(0);
                if cluster >= end || refcount == 0 {
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
        }
        let mut used: Vec<(u64, u64)> = self.references.iter().map(|(c, n)| (*c, *n)).collect();
        used.sort_unstable();
        let last = used.last().map_or(0, |(cluster, _)| cluster + 1);
        self.report.image_end_bytes = last << self.geometry.cluster_bits;
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

    /// Where a refcount block is, if a table entry can be believed.
    fn sound_block(&self, entry: u64) -> Option<u64> {
        let block = entry & spec::REFCOUNT_OFFSET_MASK;
        let sound = block != 0 && self.geometry.in_cluster(block) == 0 && block < self.file.end();
        sound.then_some(block)
    }

    fn load_block(&self, cache: &mut BlockCache, block: u64) -> Result<(), Error> {
        if cache.at == Some(block) {
            return Ok(());
        }
        let size = self.geometry.cluster_size();
        cache.bytes = match self.is_hole(block, size) {
            true => Vec::new(),
            false => self.read(block, size)?.bytes().to_vec(),
        };
        cache.at = Some(block);
        Ok(())
    }

    /// The refcount of a cluster; 0 where the table names no block that can be.
    fn refcount(&self, cache: &mut BlockCache, cluster: u64) -> Result<u64, Error> {
        let bits = self.geometry.refcount_block_bits();
        let entry = usize::try_from(cluster >> bits)
            .ok()
            .and_then(|n| self.refcount_blocks.get(n));
        let Some(block) = entry.and_then(|entry| self.sound_block(*entry)) else {
            return Ok(0);
        };
        self.load_block(cache, block)?;
        let n = (cluster & ((1 << bits) - 1)) as usize;
        Ok(get_refcount(&cache.bytes, self.geometry.refcount_order, n).unwrap_or(0))
    }

    /// COPIED must say exactly whether a refcount is one, in the active tables.
    fn check_copied(&mut self, header: &Header) -> Result<(), Error> {
        let mut cache = BlockCache::default();
        let mut seen = HashSet::new();
        for entry in self.entries(header.l1)? {
            let table = entry & OFFSET_MASK;
            if table == 0 || self.geometry.in_cluster(table) != 0 || table >= self.file.end() {
                continue;
            }
            self.compare_copied(&mut cache, table, entry, "an L2 table")?;
            if !seen.insert(table) {
                continue;
            }
            for (_, raw) in self.l2_entries(table)? {
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

/// The entries of a refcount block that may not be zero.
fn nonzero_entries(block: &[u8], order: u32) -> impl Iterator<Item = usize> {
    // In units of 8 bytes, which hold a whole number of entries of every width.
    let per_unit = 64usize >> order;
    let units = block.chunks(8).enumerate();
    units
        .filter(|(_, unit)| unit.iter().any(|byte| *byte != 0))
        .flat_map(move |(n, _)| n * per_unit..(n + 1) * per_unit)
}
