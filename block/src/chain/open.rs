//! Which files make up a chain.
//!
//! Files and their formats are stated by the caller. A header may only name files where the caller allowed it, and then only plain
//! paths beneath the folder of the top image ([`Backing::FromHeader`]).

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{Mode, OFlags, ResolveFlags};

use super::merged::Merged;
use super::{Chain, Image, MAX_LAYERS};
use crate::budget::{CacheBudget, CacheCounts};
use crate::error::{Error, ErrorKind};
use crate::io::{BlockFile, HostCounts, open_error, open_flags};
use crate::lease::{self, Held, LeaseRequest};
use crate::lock::Access;
use crate::qcow2::Qcow2;
use crate::raw::Raw;
use crate::{Backing, Cache, DiskSpec, Format, Layer};

impl Chain {
    /// Opens and locks every layer, the top `writable` ones for writing unless the disk is read-only.
    pub(crate) fn open(
        spec: &DiskSpec,
        writable: usize,
        budget: &CacheBudget,
        lease: Option<&LeaseRequest>,
    ) -> Result<Self, Error> {
        let writable = if spec.read_only { 0 } else { writable };
        let mut opener = Opener::new(writable, budget);
        opener.wanted = lease.cloned();
        Self::open_layers(spec, opener)
    }

    /// Opens every layer for reading, of which the caller has locked the top.
    pub(crate) fn open_locked(spec: &DiskSpec) -> Result<Self, Error> {
        let mut opener = Opener::new(0, &CacheBudget::default());
        opener.top_is_locked = true;
        Self::open_layers(spec, opener)
    }

    fn open_layers(spec: &DiskSpec, mut opener: Opener) -> Result<Self, Error> {
        let top = &spec.top;
        let file = BlockFile::open(&top.path, top.cache, opener.next_is_written())?;
        opener.push(file, top.format)?;
        opener.open_below(&top.path, &spec.backing)?;
        Ok(opener.finish())
    }

    /// Opens the top for writing over another disk than its header names, or over nothing: what it does not have itself reads as
    /// zero then.
    pub(crate) fn open_over(top: &Layer, below: Option<&DiskSpec>) -> Result<Self, Error> {
        let mut opener = Opener::new(1, &CacheBudget::default());
        let file = BlockFile::open(&top.path, top.cache, true)?;
        opener.push(file, top.format)?;
        if let Some(DiskSpec { top, backing, .. }) = below {
            let file = BlockFile::open(&top.path, top.cache, false)?;
            opener.push(file, top.format)?;
            opener.open_below(&top.path, backing)?;
        }
        Ok(opener.finish())
    }
}

/// Collects layers, top first.
struct Opener {
    layers: Vec<Image>,
    seen: Vec<(u64, u64)>,
    budget: CacheBudget,
    counts: Arc<CacheCounts>,
    calls: Arc<HostCounts>,
    /// How many layers, from the top, are opened for writing.
    writable: usize,
    /// The caller has locked the top.
    top_is_locked: bool,
    /// The top is to be owned.
    wanted: Option<LeaseRequest>,
    lease: Option<Held>,
}

impl Opener {
    fn new(writable: usize, budget: &CacheBudget) -> Self {
        Self {
            layers: Vec::new(),
            seen: Vec::new(),
            budget: budget.clone(),
            counts: Arc::default(),
            calls: Arc::default(),
            writable,
            top_is_locked: false,
            wanted: None,
            lease: None,
        }
    }

    fn open_below(&mut self, above: &Path, backing: &Backing) -> Result<(), Error> {
        match backing {
            Backing::Explicit(layers) => self.open_listed(layers),
            Backing::FromHeader { cache } => self.open_named(above, *cache),
        }
    }

    fn finish(mut self) -> Chain {
        let last = self.layers.len().saturating_sub(1);
        for (n, layer) in self.layers.iter_mut().enumerate() {
            if let Image::Qcow2(qcow2) = layer {
                qcow2.set_below(n < last);
            }
        }
        let merged = Merged::new(&self.layers, self.writable, &self.budget, &self.counts);
        Chain {
            lease: self.lease,
            layers: self.layers,
            writable: self.writable,
            merged,
            counts: self.counts,
            calls: self.calls,
        }
    }

    fn next_is_written(&self) -> bool {
        self.layers.len() < self.writable
    }

    fn push(&mut self, mut file: BlockFile, format: Format) -> Result<(), Error> {
        let written = self.next_is_written();
        let access = if written { Access::Write } else { Access::Read };
        let path = file.path().to_owned();
        let refuse = |reason: String| Err(Error::new(&path, ErrorKind::Backing(reason)));
        let stat = rustix::fs::fstat(file.fd()).map_err(|e| Error::io(&path, "examine it", e))?;
        let identity = (stat.st_dev, stat.st_ino);
        if self.seen.contains(&identity) {
            return refuse("appears twice in its own chain of backing files".into());
        }
        if self.layers.len() == MAX_LAYERS {
            return refuse(format!("the chain has more than {MAX_LAYERS} layers"));
        }
        self.seen.push(identity);
        if !(self.top_is_locked && self.layers.is_empty()) {
            let above = self.last().map(|above| above.file().path());
            file.lock_below(access, above)?;
            if let Some(wanted) = self.wanted.take_if(|_| written && !file.is_device()) {
                self.lease = Some(lease::take(&path, &wanted)?);
            }
        }
        file.set_counts(&self.calls);
        self.layers.push(match format {
            Format::Raw => Image::Raw(Box::new(Raw::open(file)?)),
            Format::Qcow2 => {
                let qcow2 = Qcow2::open(file, written, &self.budget, &self.counts)?;
                Image::Qcow2(Box::new(qcow2))
            }
        });
        Ok(())
    }

    fn last(&self) -> Option<&Image> {
        self.layers.last()
    }

    fn open_listed(&mut self, layers: &[Layer]) -> Result<(), Error> {
        for layer in layers {
            if let Some(above) = self.last() {
                check_stated(above, layer)?;
            }
            let file = BlockFile::open(&layer.path, layer.cache, self.next_is_written())?;
            self.push(file, layer.format)?;
        }
        let Some(bottom) = self.last() else {
            return Ok(());
        };
        let Some(backing) = bottom.header().and_then(|header| header.backing.as_ref()) else {
            return Ok(());
        };
        let name = String::from_utf8_lossy(&backing.name)
            .escape_debug()
            .to_string();
        Err(Error::new(
            bottom.file().path(),
            ErrorKind::Backing(format!(
                "its header names the backing file `{name}`, which nothing permits: list it under `backing`, or allow backing files named in headers"
            )),
        ))
    }

    fn open_named(&mut self, top: &Path, cache: Cache) -> Result<(), Error> {
        let parent = top.parent().filter(|p| !p.as_os_str().is_empty());
        let root_path = parent.unwrap_or(Path::new("."));
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::open(root_path, flags, Mode::empty())
            .map_err(|e| Error::io(root_path, "open the image's folder", e))?;
        // The folder of the present layer, relative to the root.
        let mut folder = PathBuf::new();
        loop {
            let Some(above) = self.last() else {
                return Ok(());
            };
            let Some(backing) = above.header().and_then(|header| header.backing.as_ref()) else {
                return Ok(());
            };
            let path = above.file().path().to_owned();
            let refuse = |reason: String| Error::new(&path, ErrorKind::Backing(reason));
            let shown = String::from_utf8_lossy(&backing.name)
                .escape_debug()
                .to_string();
            if backing.name.contains(&0) || is_protocol(&backing.name) {
                return Err(refuse(format!(
                    "its header's backing file `{shown}` is not a plain path"
                )));
            }
            let format = match backing.format.as_deref() {
                Some("raw") => Format::Raw,
                Some("qcow2") => Format::Qcow2,
                Some(other) => {
                    let other = other.escape_debug();
                    return Err(refuse(format!(
                        "its header gives its backing file the format `{other}`, which is not supported"
                    )));
                }
                None => {
                    return Err(refuse(format!(
                        "its header does not say which format its backing file `{shown}` has, and formats are never guessed: list it under `backing`"
                    )));
                }
            };
            let relative = folder.join(Path::new(OsStr::from_bytes(&backing.name)));
            let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
            let fd = match rustix::fs::openat2(
                &root,
                &relative,
                open_flags(cache, self.next_is_written()),
                Mode::empty(),
                resolve,
            ) {
                Ok(fd) => fd,
                Err(rustix::io::Errno::XDEV) => {
                    return Err(refuse(format!(
                        "its header's backing file `{shown}` lies outside of `{}`: list it under `backing`",
                        root_path.display()
                    )));
                }
                Err(errno) => {
                    let written = self.next_is_written();
                    return Err(open_error(
                        &root_path.join(&relative),
                        cache,
                        written,
                        errno,
                    ));
                }
            };
            let file = BlockFile::from_fd(&root_path.join(&relative), fd, cache)?;
            self.push(file, format)?;
            folder = relative.parent().map(Path::to_owned).unwrap_or_default();
        }
    }
}

/// A statement about a backing file must not contradict the one thing that is written down about it.
fn check_stated(above: &Image, layer: &Layer) -> Result<(), Error> {
    let refuse = |reason: String| Err(Error::new(above.file().path(), ErrorKind::Backing(reason)));
    let Some(header) = above.header() else {
        return refuse("a raw image has no backing files".into());
    };
    let Some(backing) = &header.backing else {
        // Where it has nothing it reads as zero, and whoever discarded there relied on that.
        return refuse(format!(
            "its header names no backing file, so it has none (it may have been flattened): do not list `{}` below it",
            layer.path.display()
        ));
    };
    let Some(format) = backing.format.as_deref() else {
        return Ok(());
    };
    let stated = match layer.format {
        Format::Raw => "raw",
        Format::Qcow2 => "qcow2",
    };
    if matches!(format, "raw" | "qcow2") && format != stated {
        return refuse(format!(
            "its header says that its backing file is {format}, but `{}` is stated to be {stated}",
            layer.path.display()
        ));
    }
    Ok(())
}

/// `proto:…` and `json:…`, as QEMU tells them from paths: a colon before the first slash.
fn is_protocol(name: &[u8]) -> bool {
    let path = Path::new(OsStr::from_bytes(name));
    match path.components().next() {
        Some(Component::Normal(first)) => first.as_bytes().contains(&b':'),
        _ => false,
    }
}
