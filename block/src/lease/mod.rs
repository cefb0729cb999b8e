//! Who owns an image that is written: a lease in the file `IMAGE.lease` beside it.
//!
//! Locks ([`crate::lock`]) keep processes of one host apart and end with them. A lease is kept over the death of its holder, and tells
//! other hosts, where a shared file system keeps locks local to each.
//!
//! ```text
//!            take                            supersede
//!   free ───────────> held by P, epoch + 1 ─────────────> superseded by OVERLAY
//!     ^ ^               │      │ P has died                    │        │
//!     │ └───────────────┘      └──> held by Q, epoch + 1       │        │
//!     │     give back               (taken over)               │        │
//!     └──── restore (the overlay was committed back) ──────────┘        │
//!     └──── break (an operator who knows better), epoch + 1 ────────────┘ and from held
//! ```
//!
//! | the lease says | who takes it | who only writes, as a job does |
//! |---|---|---|
//! | nothing there, free | gets it | goes on |
//! | held by this process | goes on with it | goes on |
//! | held by a process of this host that runs | refused | refused |
//! | held by one of this host that has ended | takes it over | goes on |
//! | held on another host | refused | refused |
//! | superseded | refused | refused, unless it commits that overlay |
//! | damaged | refused | refused |
//!
//! A lease is taken after the image's locks and before its tables are read. Reading needs none. Block devices have none: what
//! may attach them is decided elsewhere.

mod cut;
mod file;
mod record;
#[cfg(test)]
mod tests;

use std::cell::Cell;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use self::file::{Failure, Found, Slot};
pub use self::record::{Lease, LeaseHolder};
use self::record::{Place, Verdict};
use crate::Cache;
use crate::error::{Error, ErrorKind};
use crate::io::BlockFile;
use crate::lock::Access;

/// Wish of a disk to own its top image; see [`DiskOptions::lease`](crate::DiskOptions::lease).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseRequest {
    /// What for, like the name of a VM; the first 64 bytes are kept.
    pub owner: String,
}

/// What a lease means to this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseStanding {
    /// Nobody holds the image.
    Free,
    /// This process does.
    Own,
    /// A process of this host does.
    Held,
    /// A process of this host did, and has ended: the next one takes it over.
    Abandoned,
    /// A process of another host does; nobody here knows whether it runs.
    Elsewhere,
    /// It goes on in an overlay.
    Superseded,
}

/// What the lease of an image says; `None` where there is none.
///
/// # Errors
/// The file cannot be read or understood.
pub fn read(image: &Path) -> Result<Option<(Lease, LeaseStanding)>, Error> {
    let slot = Slot::of(image)?;
    let lease = match slot.read()? {
        Found::Nothing => return Ok(None),
        Found::Lease(lease) => lease,
        Found::Damaged(reason) => return Err(damaged(&slot, &reason)),
    };
    let standing = match &lease {
        Lease {
            superseded_by: Some(_),
            ..
        } => LeaseStanding::Superseded,
        Lease {
            holder: Some(holder),
            ..
        } => match here(&slot)?.judge(holder, record::started) {
            Verdict::Own => LeaseStanding::Own,
            Verdict::Alive => LeaseStanding::Held,
            // A process of another container cannot be seen, but its lock can.
            Verdict::Gone if is_written(slot.image()) => LeaseStanding::Held,
            Verdict::Gone => LeaseStanding::Abandoned,
            Verdict::Elsewhere => LeaseStanding::Elsewhere,
        },
        _ => LeaseStanding::Free,
    };
    Ok(Some((lease, standing)))
}

/// Whether the lease of an image is held by a process that is known to have ended.
pub(crate) fn holder_has_died(image: &Path) -> bool {
    let ended = || {
        let slot = Slot::of(image).ok()?;
        let place = here(&slot).ok()?;
        let Found::Lease(Lease {
            holder: Some(holder),
            ..
        }) = slot.read().ok()?
        else {
            return None;
        };
        // A process of another container is not seen, whether it has ended or not.
        let visible = (holder.boot, holder.pid_namespace) == (place.boot, place.pid_namespace);
        Some(visible && place.judge(&holder, record::started) == Verdict::Gone)
    };
    ended().unwrap_or(false)
}

/// Whether somebody on this host has an image open for writing.
fn is_written(image: &Path) -> bool {
    BlockFile::open(image, Cache::Buffered, false)
        .is_ok_and(|file| file.lock_only(Access::Read).is_err())
}

/// Breaks the lease of an image, whoever held it and on whatever host: for an operator who knows that it is not used. What it said
/// before, if it could be understood.
///
/// # Errors
/// A process of this host uses the image, or the file cannot be written.
pub fn break_lease(image: &Path) -> Result<Option<Lease>, Error> {
    let slot = Slot::of(image)?;
    // Nobody on this host is to be robbed.
    let file = BlockFile::open(slot.image(), Cache::Buffered, true)?;
    file.lock_only(Access::Write)?;
    let place = here(&slot)?;
    let found = slot.read()?;
    if let Found::Lease(Lease {
        holder: Some(holder),
        ..
    }) = &found
        && place.judge(holder, record::started) == Verdict::Alive
    {
        return Err(refusal(&slot, &alive(holder)));
    }
    slot.forget_next()?;
    let (before, epoch) = match &found {
        Found::Nothing => return Ok(None),
        Found::Lease(lease) => (Some(lease.clone()), lease.epoch.saturating_add(1)),
        // Whatever the epoch was, the time is later.
        Found::Damaged(_) => (None, now_seconds()),
    };
    replace(&slot, &found, &Lease::free(epoch), &place)?;
    Ok(before)
}

/// Writes down that an image goes on in `overlay`, so that nobody writes to it any more. It has to be free, or held by this process.
///
/// # Errors
/// Another holds the image, or the file cannot be written.
pub fn supersede(image: &Path, overlay: &Path) -> Result<(), Error> {
    let slot = Slot::of(image)?;
    let place = here(&slot)?;
    let found = slot.read()?;
    // It is ours by the lease, or by the lock meanwhile.
    let _file = if is_own(&found, &place) {
        None
    } else {
        let file = BlockFile::open(slot.image(), Cache::Buffered, true)?;
        file.lock_only(Access::Write)?;
        Some(file)
    };
    admit(&slot, &found, &place, None)?;
    let overlay =
        std::path::absolute(overlay).map_err(|e| file::io_error(overlay, "find its folder", e))?;
    if overlay.to_str().is_none() {
        return Err(refusal(&slot, "the overlay's name is not UTF-8"));
    }
    let lease = Lease {
        superseded_by: Some(overlay),
        ..Lease::free(epoch_of(&found).saturating_add(1))
    };
    replace(&slot, &found, &lease, &place).map(drop)
}

/// Takes back [`supersede`] once `overlay` was committed to the image, or was never used.
///
/// # Errors
/// The image goes on in another overlay, or the file cannot be written.
pub fn restore(image: &Path, overlay: &Path) -> Result<(), Error> {
    let slot = Slot::of(image)?;
    let place = here(&slot)?;
    let found = slot.read()?;
    match &found {
        Found::Lease(lease) if lease.superseded_by.is_some() => {
            admit(&slot, &found, &place, Some(overlay))?;
            let free = Lease::free(lease.epoch.saturating_add(1));
            replace(&slot, &found, &free, &place).map(drop)
        }
        _ => Ok(()),
    }
}

/// Gives the lease of an image back if this process holds it, for one that was closed with
/// [`Disk::close_keeping_lease`](crate::Disk::close_keeping_lease) and will not be opened again.
///
/// # Errors
/// The file cannot be read or written.
pub fn give_back(image: &Path) -> Result<(), Error> {
    let slot = Slot::of(image)?;
    let place = here(&slot)?;
    let found = slot.read()?;
    let Found::Lease(Lease {
        holder: Some(holder),
        epoch,
        ..
    }) = &found
    else {
        return Ok(());
    };
    if place.judge(holder, record::started) != Verdict::Own {
        return Ok(());
    }
    replace(&slot, &found, &Lease::free(*epoch), &place).map(drop)
}

/// A lease that is held; given back when dropped.
pub(crate) struct Held {
    file: OwnedFd,
    lease: Lease,
    keep: Cell<bool>,
}

impl Held {
    /// Leaves the lease with this process when this is dropped.
    pub(crate) fn keep(&self) {
        self.keep.set(true);
    }

    /// Whether the lease is still ours: no other file has taken its place.
    pub(crate) fn is_ours(&self) -> bool {
        rustix::fs::fstat(&self.file).is_ok_and(|stat| stat.st_nlink > 0)
    }

    /// Its epoch.
    pub(crate) fn epoch(&self) -> u64 {
        self.lease.epoch
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if self.keep.get() {
            return;
        }
        if let Err(error) = file::overwrite(&self.file, &Lease::free(self.lease.epoch)) {
            tracing::warn!(%error, "cannot give a lease back: it ends with this process");
        }
    }
}

/// Whether an image may be written whose locks this process has; `above` is the overlay over it, which may be committed to it.
pub(crate) fn check(image: &Path, above: Option<&Path>) -> Result<(), Error> {
    let slot = Slot::of(image)?;
    let found = slot.read()?;
    if matches!(found, Found::Nothing) {
        return Ok(());
    }
    admit(&slot, &found, &here(&slot)?, above)
}

/// Takes the lease of an image whose locks this process has.
pub(crate) fn take(image: &Path, request: &LeaseRequest) -> Result<Held, Error> {
    let slot = Slot::of(image)?;
    take_from(&slot, request, &here(&slot)?)
}

fn take_from(slot: &Slot, request: &LeaseRequest, place: &Place) -> Result<Held, Error> {
    let found = slot.read()?;
    admit(slot, &found, place, None)?;
    let holder = place.holder(&request.owner);
    let held = |file, lease| Held {
        file,
        lease,
        keep: Cell::new(false),
    };
    let own = is_own(&found, place);
    if own
        && let Found::Lease(lease) = &found
        && lease
            .holder
            .as_ref()
            .is_some_and(|seen| seen.owner == holder.owner)
        && let Some(file) = slot.open_again(&found)?
    {
        // Nothing is written: a disk that is changed while it is in use comes back on a full file system, too.
        return Ok(held(file, lease.clone()));
    }
    let epoch = epoch_of(&found).saturating_add(u64::from(!own));
    let lease = Lease {
        holder: Some(holder),
        ..Lease::free(epoch)
    };
    let file = replace(slot, &found, &lease, place)?;
    Ok(held(file, lease))
}

fn is_own(found: &Found, place: &Place) -> bool {
    let Found::Lease(lease) = found else {
        return false;
    };
    let holder = lease.holder.as_ref();
    holder.is_some_and(|holder| place.judge(holder, record::started) == Verdict::Own)
}

fn epoch_of(found: &Found) -> u64 {
    match found {
        Found::Lease(lease) => lease.epoch,
        _ => 0,
    }
}

/// Whether what lies beside an image lets this process write it.
fn admit(slot: &Slot, found: &Found, place: &Place, above: Option<&Path>) -> Result<(), Error> {
    let lease = match found {
        Found::Nothing => return Ok(()),
        Found::Lease(lease) => lease,
        Found::Damaged(reason) => return Err(damaged(slot, reason)),
    };
    if let Some(overlay) = &lease.superseded_by {
        let is_above = above.is_some_and(|above| {
            let real = |path: &Path| std::fs::canonicalize(path).ok();
            std::path::absolute(above).is_ok_and(|above| above == *overlay)
                || real(above).is_some_and(|above| Some(above) == real(overlay))
        });
        if is_above {
            return Ok(());
        }
        let reason = format!(
            "it goes on in the overlay `{}`, which writing to it would damage: use the overlay, or commit it; if that is gone for good, `drover image lease break {}`",
            overlay.display(),
            slot.image().display()
        );
        return Err(refusal(slot, &reason));
    }
    let Some(holder) = &lease.holder else {
        return Ok(());
    };
    match place.judge(holder, record::started) {
        Verdict::Own | Verdict::Gone => Ok(()),
        Verdict::Alive => Err(refusal(slot, &alive(holder))),
        Verdict::Elsewhere => Err(elsewhere(slot, holder)),
    }
}

fn alive(holder: &LeaseHolder) -> String {
    format!("it is held by {holder}, which runs: stop it first")
}

fn elsewhere(slot: &Slot, holder: &LeaseHolder) -> Error {
    let reason = format!(
        "it is held by {holder}, another host: stop it there; if it is certain that it does not run any more, `drover image lease break {}`",
        slot.image().display()
    );
    refusal(slot, &reason)
}

fn refusal(slot: &Slot, reason: &str) -> Error {
    Error::new(slot.image(), ErrorKind::Leased(reason.to_owned()))
}

fn damaged(slot: &Slot, reason: &str) -> Error {
    let reason = format!(
        "its lease `{}` cannot be understood ({reason}): if nobody uses the image, `drover image lease break {}`",
        slot.path().display(),
        slot.image().display()
    );
    refusal(slot, &reason)
}

fn here(slot: &Slot) -> Result<Place, Error> {
    Place::here().map_err(|e| file::io_error(slot.image(), "find out who would hold it", e))
}

fn now_seconds() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(1, |now| now.as_secs())
}

/// Puts a lease in the place of the one that was found.
fn replace(slot: &Slot, found: &Found, new: &Lease, place: &Place) -> Result<OwnedFd, Error> {
    // One that was left behind by this host is taken away, and then it is ours.
    for _ in 0..2 {
        match slot.replace(found, new, place) {
            Ok(file) => return Ok(file),
            Err(Failure::Io(doing, source)) => {
                return Err(file::io_error(slot.path(), doing, source));
            }
            Err(Failure::Changed) => break,
            Err(Failure::Contested(other)) => {
                let lease = match *other {
                    Found::Nothing => continue,
                    Found::Damaged(reason) => return Err(damaged(slot, &reason)),
                    Found::Lease(lease) => lease,
                };
                let verdict = lease
                    .holder
                    .as_ref()
                    .map(|holder| (holder, place.judge(holder, record::started)));
                match verdict {
                    Some((holder, Verdict::Alive)) => return Err(refusal(slot, &alive(holder))),
                    Some((holder, Verdict::Elsewhere)) => return Err(elsewhere(slot, holder)),
                    _ => slot.forget_next()?,
                }
            }
        }
    }
    Err(refusal(
        slot,
        "somebody else is taking it at the same time: see who holds it, and try again",
    ))
}
