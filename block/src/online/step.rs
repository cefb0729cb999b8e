//! One step of a job: a task among the guest's, over a piece of the disk.
//!
//! ```text
//!  look at the tables, nothing held ── nothing to do here, nor further on ──> the next step begins behind that
//!        │ something
//!        v
//!  hold the clusters exclusively ─> look again ─> copy in pieces of 1 MiB
//! ```
//!
//! That there is nothing to do at a place never changes back: a cluster that the top has, it keeps while it is flattened (a discard
//! hides what is below), and one that it does not have it does not get while it is committed ([`super::two`]). So a step that
//! found nothing may speak for later ones.

use std::ops::Range;

use super::Job;
use super::two::Lower;
use crate::buffers::Pages;
use crate::chain::{Chain, Image};
use crate::disk::Core;
use crate::error::IoError;
use crate::qcow2::{Clear, Mapping, Qcow2};
use crate::task::Kind;

/// Bytes that are copied at a time: what a step needs of memory.
const COPY: u64 = 1 << 20;

/// Bytes that are made zero at a time, where that is a change of tables only.
const MOST_ZEROES: u64 = 64 << 20;

/// What a step is to do.
pub(crate) enum Step {
    /// The job's work on a range that begins at a cluster of the top image.
    Work(Job, Range<u64>),
    /// What is left when the whole disk has been worked through.
    Finish(Job),
}

/// How a step ended.
pub(crate) struct StepEnd {
    /// Where it began; the disk's end for the last step.
    pub(super) start: u64,
    pub(super) last: bool,
    pub(super) result: Result<Worked, Failure>,
}

/// What went wrong, and with which layer.
pub(super) struct Failure {
    pub(super) depth: usize,
    pub(super) error: IoError,
}

/// Where nothing else is said, it was the top.
impl From<IoError> for Failure {
    fn from(error: IoError) -> Self {
        Self { depth: 0, error }
    }
}

fn below(error: IoError) -> Failure {
    Failure { depth: 1, error }
}

/// What a step achieved.
#[derive(Clone, Copy, Default)]
pub(super) struct Worked {
    /// Nothing is left to be done from its beginning up to here; at least its end.
    pub(super) to: u64,
    /// Bytes copied.
    pub(super) moved: u64,
}

impl Step {
    pub(crate) async fn run(self, core: &Core) -> StepEnd {
        let size = core.chain.top().size();
        let (start, last) = match &self {
            Self::Work(_, range) => (range.start, false),
            Self::Finish(_) => (size, true),
        };
        let result = match self {
            Self::Work(Job::Flatten, range) => flatten(&core.chain, range).await,
            Self::Work(Job::Commit, range) => commit(&core.chain, range).await,
            Self::Finish(job) => finish(core, job)
                .await
                .map(|()| Worked { to: size, moved: 0 }),
        };
        StepEnd {
            start,
            last,
            result,
        }
    }
}

fn top(chain: &Chain) -> Result<&Qcow2, IoError> {
    match chain.top() {
        Image::Qcow2(top) => Ok(top),
        Image::Raw(_) => Err(IoError::Unsupported("a job on the layers of a raw image")),
    }
}

fn is_zero(bytes: &[u8]) -> bool {
    const ZEROS: [u8; 4096] = [0; 4096];
    let chunks = &mut bytes.chunks(ZEROS.len());
    chunks.all(|chunk| ZEROS.get(..chunk.len()) == Some(chunk))
}

fn is_data(mapping: Mapping) -> bool {
    matches!(mapping, Mapping::Data { .. } | Mapping::Compressed { .. })
}

async fn finish(core: &Core, job: Job) -> Result<(), Failure> {
    match job {
        Job::Flatten => top(&core.chain)?.forget_backing().await?,
        Job::Commit => core.flush().await?,
    }
    Ok(())
}

async fn flatten(chain: &Chain, range: Range<u64>) -> Result<Worked, Failure> {
    let top = top(chain)?;
    let size = top.size();
    let mut at = range.start;
    loop {
        let located = chain.locate(at, size - at).await?;
        if located.depth > 0 && is_data(located.mapping) {
            break;
        }
        at += located.length;
        if at >= range.end {
            return Ok(Worked { to: at, moved: 0 });
        }
    }
    top.begin().await?;
    let _hold = top.hold(at, range.end - at, Kind::Exclusive).await;
    let mut moved = 0;
    while at < range.end {
        let most = (range.end - at).min(COPY);
        let missing =
            |located: &crate::chain::Located| located.depth > 0 && is_data(located.mapping);
        let first = chain.locate(at, most).await?;
        let mut length = first.length;
        if !missing(&first) {
            at += length;
            continue;
        }
        while length < most {
            let next = chain.locate(at + length, most - length).await?;
            if !missing(&next) {
                break;
            }
            length += next.length;
        }
        let mut pages = Pages::zeroed(length as usize);
        chain.read_held(at, pages.span()).await?;
        write_what_is_not_zero(chain, top, at, &mut pages).await?;
        moved += length;
        at += length;
    }
    Ok(Worked {
        to: range.end,
        moved,
    })
}

/// Zeros need no space once nothing is below: units of the top image that hold nothing else are left out.
async fn write_what_is_not_zero(
    chain: &Chain,
    top: &Qcow2,
    at: u64,
    pages: &mut Pages,
) -> Result<(), IoError> {
    let length = pages.bytes().len();
    let unit = top.unit_size();
    // The end of the unit in which the byte of this number lies.
    let unit_end =
        |n: usize| (((at + n as u64) / unit + 1) * unit - at).min(length as u64) as usize;
    let mut from = 0;
    while from < length {
        let mut to = unit_end(from);
        let zero = |pages: &Pages, from: usize, to: usize| {
            is_zero(pages.bytes().get(from..to).unwrap_or_default())
        };
        let skip = zero(pages, from, to);
        while to < length && zero(pages, to, unit_end(to)) == skip {
            to = unit_end(to);
        }
        if !skip {
            let data = pages.span().part(from, to - from);
            top.write_held(chain.view(0), at + from as u64, data)
                .await?;
        }
        from = to;
    }
    Ok(())
}

async fn commit(chain: &Chain, range: Range<u64>) -> Result<Worked, Failure> {
    let top = top(chain)?;
    let lower = Lower::of(chain)?;
    let size = top.size();
    let mut at = range.start;
    let first = loop {
        let extent = top.map(at, size - at).await?;
        if !is_below(extent.mapping) {
            break extent;
        }
        at += extent.length;
        if at >= range.end {
            return Ok(Worked { to: at, moved: 0 });
        }
    };
    let mut end = range.end;
    if let Mapping::Zero | Mapping::ZeroKept { .. } = first.mapping
        && lower.zeroes_cheaply()
    {
        // Nothing is copied for it, so a flush is shared by more.
        let far = (at + first.length.min(MOST_ZEROES)).min(size);
        end = end.max(if far < size {
            far - far % top.cluster_size()
        } else {
            far
        });
    }
    top.begin().await?;
    // Whole clusters: their entries are cleared whole.
    let start = at - at % top.cluster_size();
    let _hold = top.hold(start, end - start, Kind::Exclusive).await;
    let mut at = start;
    let mut moved = 0;
    while at < end {
        let most = (end - at).min(COPY);
        let extent = top.map(at, end - at).await?;
        let mut length = extent.length;
        match extent.mapping {
            Mapping::Below | Mapping::BelowKept { .. } => {}
            Mapping::Zero | Mapping::ZeroKept { .. } => {
                if !chain.view(1).is_zero(at, length).await? {
                    lower.zero(at, length).await.map_err(below)?;
                }
            }
            Mapping::Data { .. } | Mapping::Compressed { .. } => {
                length = length.min(most);
                while length < most {
                    let next = top.map(at + length, most - length).await?;
                    if !is_data(next.mapping) {
                        break;
                    }
                    length += next.length;
                }
                let mut pages = Pages::zeroed(length as usize);
                chain.read_held(at, pages.span()).await?;
                lower.write(at, pages.span()).await.map_err(below)?;
                moved += length;
            }
        }
        at += length;
    }
    // What the layer below has got must be durable before the top forgets it.
    lower.flush().await.map_err(below)?;
    top.clear_held(chain.view(0), start, end - start, Clear::Forget)
        .await?;
    Ok(Worked { to: end, moved })
}

pub(super) fn is_below(mapping: Mapping) -> bool {
    matches!(mapping, Mapping::Below | Mapping::BelowKept { .. })
}
