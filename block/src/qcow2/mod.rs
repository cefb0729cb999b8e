//! The qcow2 engine: one image of a chain.
//!
//! | file | what |
//! |---|---|
//! | [`spec`] | layouts on disk |
//! | [`header`], [`snapshots`] | parsing and checking |
//! | [`table`] | cache of L2 tables and refcount blocks |
//! | [`map`] | guest offset -> where the bytes are |
//! | [`compressed`], [`pack`] | inflating clusters, storing compressed ones |
//! | [`refcount`], [`alloc`] | which clusters are in use; taking and giving back |
//! | [`write`], [`discard`] | what a guest's requests do to clusters |
//! | [`flush`] | the order in which changes become durable |
//! | [`states`] | clusters on their way from one state to another |
//! | [`overlap`] | metadata is never overwritten |
//! | [`resize`], [`relabel`] | another size; another name below |
//!
//! A host cluster is in one state at a time:
//!
//! ```text
//!           allocate                    L2 entry set
//!   free ────────────> COW in flight ────────────────> allocated
//!    ^                  │ failed                         │ discarded or replaced: L2 entry cleared (in memory)
//!    │<─────────────────┘                                v
//!    │                                            discard in flight
//!    │    hole punched, refcount 0                       │ flush: the cleared entry is durable
//!    └────────────────────────────────── punch pending <─┘
//! ```
//!
//! Guest clusters are held shared by reads and writes in place, exclusively by whatever changes their mapping
//! ([`Qcow2::clusters`]); tables are changed under [`Qcow2::meta`]. Order of taking: clusters, then tables.

mod alloc;
mod compressed;
mod discard;
mod flush;
pub(crate) mod header;
mod map;
mod overlap;
mod pack;
mod refcount;
pub(crate) mod relabel;
mod resize;
pub(crate) mod snapshots;
pub(crate) mod spec;
mod states;
mod table;
mod write;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeSet, HashMap};
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

pub(crate) use self::discard::Clear;
pub(crate) use self::map::{Extent, Mapping};

use self::alloc::Allocator;
use self::compressed::Inflated;
use self::header::{Header, TableAt};
use self::overlap::Overlap;
use self::snapshots::Snapshot;
use self::spec::{Geometry, Incompatible};
use self::states::{InFlight, Transit};
use self::table::TableCache;
use crate::budget::{CacheBudget, CacheCounts};
use crate::buffers::Pages;
use crate::error::{Error, ErrorKind, IoError};
use crate::io::BlockFile;
use crate::task::{self, Guard, Kind, RangeLock};

/// A table of 64-bit entries held in memory.
struct Entries {
    at: TableAt,
    entries: Vec<u64>,
}

/// An open qcow2 image.
pub(crate) struct Qcow2 {
    file: BlockFile,
    header: Header,
    size: Cell<u64>,
    writable: bool,
    /// Whether a layer lies below: then unallocated is not zero.
    has_below: bool,
    l1: RefCell<Entries>,
    l1_dirty: RefCell<BTreeSet<usize>>,
    refcount_table: RefCell<Entries>,
    tables: TableCache,
    allocator: RefCell<Allocator>,
    overlap: RefCell<Overlap>,
    /// Clusters on their way.
    in_flight: RefCell<InFlight>,
    snapshots: Vec<Snapshot>,
    inflated: RefCell<Inflated>,
    /// Where the next compressed cluster may go: behind the last one.
    packed_to: Cell<Option<u64>>,
    /// One unit: the tables.
    meta: RangeLock,
    /// Guest clusters.
    clusters: RangeLock,
    /// Whether the duties of the first write are done.
    begun: Cell<bool>,
    /// Incompatible features as the file has them now.
    incompatible: Cell<Incompatible>,
    /// The true refcounts of an image that was not closed cleanly, until they are written.
    references: RefCell<Option<HashMap<u64, u64>>>,
    /// Which flushes have begun and which of them are over.
    flushes: flush::Flushes,
    /// Why writing has ended, if it has.
    stopped: Cell<Option<&'static str>>,
}

/// The header of the image in `file`, checked.
pub(crate) fn read_header(file: &BlockFile) -> Result<Header, Error> {
    let path = file.path();
    let read = |length: usize| {
        let available = usize::try_from(file.end()).unwrap_or(usize::MAX);
        let mut pages = Pages::zeroed(length.min(available));
        task::complete(file.read(0, pages.span()))
            .map_err(|e| Error::io(path, "read its header", e))?;
        Ok(pages)
    };
    let start = read(4096)?;
    let wanted = Header::wanted(path, start.bytes())?;
    let header = Header::parse(path, read(wanted)?.bytes())?;
    for (field, at) in [
        ("l1_table_offset", header.l1),
        ("refcount_table_offset", header.refcount_table),
    ] {
        if at.entries > 0 && at.offset >= file.end() {
            return Err(Error::header(path, field, "lies past the end of the file"));
        }
    }
    Ok(header)
}

impl Qcow2 {
    /// Opens the image in `file`. Changes nothing in it.
    pub(crate) fn open(
        file: BlockFile,
        writable: bool,
        budget: &CacheBudget,
        counts: &Arc<CacheCounts>,
    ) -> Result<Self, Error> {
        let header = read_header(&file)?;
        let path = file.path();
        let geometry = header.geometry;
        if writable {
            check_writable(path, &header)?;
        }
        let l1 = load_entries(&file, header.l1)?;
        let (refcount_table, snapshots, overlap) = if writable {
            let (snapshots, length) = load_snapshots(&file, &header)?;
            let refcount_table = load_entries(&file, header.refcount_table)?;
            let overlap = claim_metadata(&header, &l1, &refcount_table, &snapshots, length)
                .map_err(|what| Error::new(path, ErrorKind::NotWritable(what)))?;
            (refcount_table, snapshots, overlap)
        } else {
            (Vec::new(), Vec::new(), Overlap::default())
        };
        let dirty = writable && header.incompatible.contains(Incompatible::DIRTY);
        let references = match dirty {
            true => Some(count_references(&file, &header)?),
            false => None,
        };
        Ok(Self {
            size: Cell::new(header.size),
            incompatible: Cell::new(header.incompatible),
            references: RefCell::new(references),
            writable,
            has_below: false,
            l1: RefCell::new(Entries {
                at: header.l1,
                entries: l1,
            }),
            l1_dirty: RefCell::default(),
            refcount_table: RefCell::new(Entries {
                at: header.refcount_table,
                entries: refcount_table,
            }),
            tables: TableCache::new(geometry.cluster_size(), writable, budget, counts),
            allocator: RefCell::default(),
            overlap: RefCell::new(overlap),
            in_flight: RefCell::default(),
            snapshots,
            inflated: RefCell::default(),
            packed_to: Cell::new(None),
            meta: RangeLock::default(),
            clusters: RangeLock::default(),
            begun: Cell::new(false),
            flushes: flush::Flushes::default(),
            stopped: Cell::new(None),
            file,
            header,
        })
    }

    /// Says whether a layer lies below.
    pub(crate) fn set_below(&mut self, has_below: bool) {
        self.has_below = has_below;
    }

    pub(crate) fn file(&self) -> &BlockFile {
        &self.file
    }

    pub(crate) fn file_mut(&mut self) -> &mut BlockFile {
        &mut self.file
    }

    pub(crate) fn header(&self) -> &Header {
        &self.header
    }

    /// Size of the disk in bytes.
    pub(crate) fn size(&self) -> u64 {
        self.size.get()
    }

    /// Bytes of a cluster.
    pub(crate) fn cluster_size(&self) -> u64 {
        self.geometry().cluster_size()
    }

    /// Bytes of what is mapped as one: a cluster, or a subcluster.
    pub(crate) fn unit_size(&self) -> u64 {
        1 << self.geometry().unit_bits()
    }

    fn geometry(&self) -> Geometry {
        self.header.geometry
    }

    /// Waits for a range of guest bytes to be free of conflicting requests.
    pub(crate) async fn hold(&self, offset: u64, length: u64, kind: Kind) -> Guard<'_> {
        self.clusters
            .hold(self.cluster_range(offset, length), kind)
            .await
    }

    fn cluster_range(&self, offset: u64, length: u64) -> Range<u64> {
        let last = offset.saturating_add(length.saturating_sub(1));
        self.geometry().cluster(offset)..self.geometry().cluster(last) + 1
    }

    /// The tables, to oneself.
    async fn meta(&self) -> Guard<'_> {
        self.meta.hold(0..1, Kind::Exclusive).await
    }

    /// The duties before anything is changed: writing must not have stopped, and features that claim to describe the data
    /// and that we do not maintain are switched off.
    pub(crate) async fn begin(&self) -> Result<(), IoError> {
        if let Some(reason) = self.stopped.get() {
            return Err(IoError::Stopped(reason));
        }
        if !self.writable {
            return Err(IoError::ReadOnly);
        }
        if self.begun.get() {
            return Ok(());
        }
        let _meta = self.meta().await;
        if self.header.version >= 3 && self.header.autoclear != 0 {
            self.write_bytes(spec::field::AUTOCLEAR_FEATURES, &[0; 8], "write the header")
                .await?;
            self.sync().await?;
        }
        self.rebuild_refcounts().await?;
        self.begun.set(true);
        Ok(())
    }

    /// Ends all writing and marks the image, because following its tables would destroy it.
    async fn corrupt(&self, host_offset: u64, reason: &'static str) -> IoError {
        tracing::error!(
            image = %self.file.path().display(), host_offset, reason,
            "corrupt qcow2 image: writing stops; repair it with `drover image repair --all`"
        );
        self.stopped.set(Some("the image is corrupt"));
        if self.header.version >= 3 {
            let features = self.incompatible.get() | Incompatible::CORRUPT;
            let bytes = features.bits().to_be_bytes();
            let at = spec::field::INCOMPATIBLE_FEATURES;
            // The image is broken either way; the mark only warns the next one to open it.
            let _ = self.write_bytes(at, &bytes, "mark the image corrupt").await;
            let _ = self.file.sync().await;
        }
        IoError::corrupt(host_offset, reason)
    }

    /// Takes host clusters to another state; a step that cannot be ends all writing.
    fn step(&self, clusters: Range<u64>, to: Option<Transit>) -> Result<(), IoError> {
        self.in_flight
            .borrow_mut()
            .step(clusters, to)
            .map_err(|wrong| {
                const REASON: &str = "the engine has lost track of a cluster";
                tracing::error!(image = %self.file.path().display(), ?wrong, "{REASON}: writing stops");
                self.stopped.set(Some(REASON));
                IoError::Stopped(REASON)
            })
    }

    /// Writes a few bytes of metadata in place.
    async fn write_bytes(&self, at: u64, bytes: &[u8], doing: &'static str) -> Result<(), IoError> {
        let mut pages = Pages::zeroed(bytes.len());
        pages.bytes_mut().copy_from_slice(bytes);
        self.file
            .write(at, pages.span())
            .await
            .map_err(|e| IoError::host(doing, at, &e))
    }

    /// Makes what was written durable; a failure ends all writing, because nobody knows what was lost.
    async fn sync(&self) -> Result<(), IoError> {
        self.file.sync().await.map_err(|error| {
            self.stopped.set(Some("an earlier fdatasync failed"));
            IoError::host("make writes durable", 0, &error)
        })
    }

    /// Sees to it that a piece of a table is in the cache.
    async fn load_piece(&self, piece: u64) -> Result<(), IoError> {
        if piece >= self.file.end() && !self.tables.contains(piece) {
            // It would read as zeros, and as many bytes would be added to the file when it is written.
            return Err(IoError::corrupt(
                piece,
                "a table lies past the end of the file",
            ));
        }
        let load = self.tables.load(&self.file, piece).await;
        load.map_err(|e: io::Error| IoError::host("read a table", piece, &e))
    }
}

fn check_writable(path: &Path, header: &Header) -> Result<(), Error> {
    let refuse = |reason: &str| Err(Error::new(path, ErrorKind::NotWritable(reason.to_owned())));
    if header.incompatible.contains(Incompatible::CORRUPT) {
        return refuse("it is marked corrupt; repair it with `drover image repair --all`");
    }
    Ok(())
}

/// The references of an image whose refcounts are out of date: lazy refcounts, and no clean end.
fn count_references(file: &BlockFile, header: &Header) -> Result<HashMap<u64, u64>, Error> {
    const MOST: u64 = 4 << 20;
    if header.geometry.cluster(file.end()) > MOST {
        let reason = "it was not closed cleanly and is too large to mend in passing; mend it with `drover image repair --all`";
        let kind = ErrorKind::NotWritable(reason.into());
        return Err(Error::new(file.path(), kind));
    }
    crate::image::references(file, header)
}

fn load_entries(file: &BlockFile, at: TableAt) -> Result<Vec<u64>, Error> {
    let bytes = usize::try_from(at.entries * 8).map_err(|_| {
        Error::new(
            file.path(),
            ErrorKind::Size("a table does not fit in memory".into()),
        )
    })?;
    let mut pages = Pages::zeroed(bytes);
    task::complete(file.read(at.offset, pages.span()))
        .map_err(|e| Error::io(file.path(), "read its tables", e))?;
    Ok(be_entries(pages.bytes()).collect())
}

/// The 64-bit big-endian entries of a table.
pub(crate) fn be_entries(bytes: &[u8]) -> impl Iterator<Item = u64> {
    bytes.chunks_exact(8).map(|entry| {
        entry
            .iter()
            .fold(0, |value, b| (value << 8) | u64::from(*b))
    })
}

/// The internal snapshots and the bytes that their table takes.
pub(crate) fn load_snapshots(
    file: &BlockFile,
    header: &Header,
) -> Result<(Vec<Snapshot>, u64), Error> {
    if header.nb_snapshots == 0 {
        return Ok((Vec::new(), 0));
    }
    let available = file.end().saturating_sub(header.snapshots_offset);
    let most = available.min(spec::MAX_SNAPSHOT_TABLE_BYTES);
    let mut pages = Pages::zeroed(usize::try_from(most).unwrap_or(0));
    task::complete(file.read(header.snapshots_offset, pages.span()))
        .map_err(|e| Error::io(file.path(), "read its snapshot table", e))?;
    snapshots::parse(pages.bytes(), header.nb_snapshots)
        .map_err(|reason| Error::header(file.path(), "snapshots_offset", reason))
}

/// Puts all metadata on the map; two structures in one place are an error.
fn claim_metadata(
    header: &Header,
    l1: &[u64],
    refcount_table: &[u64],
    snapshots: &[Snapshot],
    snapshot_table_bytes: u64,
) -> Result<Overlap, String> {
    let geometry = header.geometry;
    let mut overlap = Overlap::default();
    let mut claim = |host: u64, bytes: u64, what: &'static str| {
        if bytes == 0 {
            return Ok(());
        }
        overlap.claim(geometry, host, bytes, what).map_err(|other| {
            format!("{what} at {host:#x} overlaps {other}; examine it with `drover image check`")
        })
    };
    let cluster = geometry.cluster_size();
    claim(0, cluster, "the header")?;
    claim(header.l1.offset, header.l1.entries * 8, "the L1 table")?;
    claim(
        header.refcount_table.offset,
        header.refcount_table.entries * 8,
        "the refcount table",
    )?;
    claim(
        header.snapshots_offset,
        snapshot_table_bytes,
        "the snapshot table",
    )?;
    for snapshot in snapshots {
        claim(
            snapshot.l1.offset,
            snapshot.l1.entries * 8,
            "a snapshot's L1 table",
        )?;
    }
    let blocks = refcount_table
        .iter()
        .map(|entry| entry & spec::REFCOUNT_OFFSET_MASK);
    let tables = l1.iter().map(|entry| entry & spec::OFFSET_MASK);
    let all = blocks.chain(tables).filter(|host| *host != 0);
    overlap.set_tables(geometry, all).map_err(|(host, other)| {
        format!("an L2 table or refcount block at {host:#x} overlaps {other}; examine it with `drover image check`")
    })?;
    Ok(overlap)
}
