//! The merged map: what the layers that nobody writes say together, so that a read through 33 of them costs what one costs.
//!
//! ```text
//!   layer 1   □ ■ ■ □ □ z        piece: 512 units of guest space, made on the first touch
//!   layer 2   ■ □ □ □ □ ■   ──>  [ 0: layer 2 at … | 1: layer 1 at … | 3: layer 3 at … | 5: zero ]
//!   layer 3   ■ ■ ■ ■ ■ ■
//! ```
//!
//! A unit is the smallest cluster or subcluster of those layers. Pieces are under the budget of the process like tables, the least recently
//! used go first. What a piece cannot say, because an entry there makes no sense, is left to the layers, so that only requests
//! that need it fail.

use std::cell::RefCell;
use std::sync::Arc;

use super::{Image, Located};
use crate::budget::{Account, CacheBudget, CacheCounts};
use crate::error::IoError;
use crate::lru::Lru;
use crate::qcow2::Mapping;
use crate::task::{Kind, RangeLock};

/// log2 of the units of a piece.
const UNITS_BITS: u32 = 9;
/// What a merged map may have whatever others have, in bytes; a piece fits.
const FLOOR: usize = 16 * 1024;
/// What a piece takes beside its runs, about.
const OVERHEAD: usize = 128;

/// What becomes of a run of guest bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    /// No layer has it.
    Nothing,
    Zero,
    Data,
    /// With so many bytes in sectors, counted from the sector in which the data begins.
    Compressed,
    /// The layers have to be asked.
    Unknown,
}

/// One run; it reaches to the next one's start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    /// Host offset of its first byte, of a compressed cluster where its data begins.
    host: u64,
    /// Bytes from the piece's start.
    start: u32,
    /// Of compressed data.
    sectors: u16,
    layer: u8,
    what: What,
}

/// See the module.
pub(super) struct Merged {
    /// The first layer that is part of it.
    first: usize,
    piece_bits: u32,
    pieces: RefCell<Lru<Box<[Run]>>>,
    account: Account,
    counts: Arc<CacheCounts>,
    /// Pieces that are being made.
    making: RangeLock,
}

/// What the map answers.
pub(super) enum Answer {
    Located(Located),
    /// Ask the layers.
    Unknown,
}

impl Merged {
    /// A map of the layers from `first` on, where that is worthwhile.
    pub(super) fn new(
        layers: &[Image],
        first: usize,
        budget: &CacheBudget,
        counts: &Arc<CacheCounts>,
    ) -> Option<Self> {
        let below = layers.get(first..).filter(|below| below.len() > 1)?;
        u8::try_from(layers.len()).ok()?;
        // A raw layer is one run.
        let unit_bits = below.iter().filter_map(Image::unit_bits).min()?;
        Some(Self {
            first,
            piece_bits: unit_bits + UNITS_BITS,
            pieces: RefCell::default(),
            account: Account::new(budget, FLOOR),
            counts: Arc::clone(counts),
            making: RangeLock::default(),
        })
    }

    /// The first layer that is part of it.
    pub(super) fn first(&self) -> usize {
        self.first
    }

    /// Where the first bytes of a range are, if that is known; at most `length` (not 0) of them.
    pub(super) async fn find(
        &self,
        layers: &[Image],
        offset: u64,
        length: u64,
    ) -> Result<Answer, IoError> {
        let number = offset >> self.piece_bits;
        if let Some(answer) = self.look(number, offset, length) {
            self.counts.hit();
            return Ok(answer);
        }
        // Whoever wants the same piece waits for it.
        let _turn = self.making.hold(number..number + 1, Kind::Exclusive).await;
        if self.look(number, offset, length).is_none() {
            let made = self.make(layers, number).await;
            self.counts.miss();
            match made {
                Ok(runs) => self.keep(number, runs),
                Err(error) => {
                    // A table that cannot be read: from now on only those who need it shall hear of it.
                    let unknown = Run {
                        host: 0,
                        start: 0,
                        sectors: 0,
                        layer: 0,
                        what: What::Unknown,
                    };
                    self.keep(number, Box::new([unknown]));
                    return Err(error);
                }
            }
        }
        let found = self.look(number, offset, length);
        Ok(found.unwrap_or(Answer::Unknown))
    }

    fn keep(&self, number: u64, runs: Box<[Run]>) {
        let mut pieces = self.pieces.borrow_mut();
        let bytes = size(&runs);
        let mut given = 0;
        while !self.account.admits(bytes) && given < 2 * bytes {
            let Some(oldest) = pieces.oldest(0) else {
                break;
            };
            let gone = pieces.remove(oldest).map_or(0, |runs| size(&runs));
            self.account.give(gone);
            given += gone;
        }
        self.account.take(bytes);
        pieces.insert(number, runs, 0);
    }

    fn look(&self, number: u64, offset: u64, length: u64) -> Option<Answer> {
        let mut pieces = self.pieces.borrow_mut();
        let runs = pieces.get(number)?;
        let at = offset & ((1 << self.piece_bits) - 1);
        let next = runs.partition_point(|run| u64::from(run.start) <= at);
        let run = runs.get(next.checked_sub(1)?)?;
        let end = runs
            .get(next)
            .map_or(1 << self.piece_bits, |run| u64::from(run.start));
        let mapping = match run.what {
            What::Nothing => Mapping::Below,
            What::Zero => Mapping::Zero,
            What::Data => Mapping::Data {
                host: run.host + (at - u64::from(run.start)),
                copied: false,
            },
            What::Compressed => Mapping::Compressed {
                host: run.host,
                bytes: u64::from(run.sectors) * 512 - run.host % 512,
            },
            What::Unknown => return Some(Answer::Unknown),
        };
        Some(Answer::Located(Located {
            length: length.min(end - at),
            depth: usize::from(run.layer),
            mapping,
        }))
    }

    /// Asks all layers for a piece.
    async fn make(&self, layers: &[Image], number: u64) -> Result<Box<[Run]>, IoError> {
        let start = number << self.piece_bits;
        let mut runs: Vec<Run> = Vec::new();
        // Layer, first byte and length of what has to be looked up.
        let mut work = vec![(self.first, start, 1u64 << self.piece_bits)];
        while let Some((layer, offset, length)) = work.pop() {
            let mut add = |layer: usize, offset: u64, what: What, host: u64, sectors: u16| {
                runs.push(Run {
                    host,
                    start: (offset - start) as u32,
                    sectors,
                    layer: layer as u8,
                    what,
                });
            };
            let Some(image) = layers.get(layer) else {
                add(0, offset, What::Nothing, 0, 0);
                continue;
            };
            let inside = image.size().saturating_sub(offset).min(length);
            if inside < length {
                add(layer, offset + inside, What::Zero, 0, 0);
            }
            if inside == 0 {
                continue;
            }
            let found = match image.map(offset, inside).await {
                Ok(extent) => {
                    match extent.mapping {
                        Mapping::Below | Mapping::BelowKept { .. } => {
                            work.push((layer + 1, offset, extent.length));
                        }
                        Mapping::Zero | Mapping::ZeroKept { .. } => {
                            add(layer, offset, What::Zero, 0, 0);
                        }
                        Mapping::Data { host, .. } => add(layer, offset, What::Data, host, 0),
                        Mapping::Compressed { host, bytes } => {
                            let sectors = (host % 512 + bytes) / 512;
                            match u16::try_from(sectors) {
                                Ok(sectors) => {
                                    add(layer, offset, What::Compressed, host, sectors);
                                }
                                Err(_) => add(layer, offset, What::Unknown, 0, 0),
                            }
                        }
                    }
                    extent.length
                }
                Err(IoError::Corrupt { .. }) => {
                    add(layer, offset, What::Unknown, 0, 0);
                    let unit = 1 << image.unit_bits().unwrap_or(UNITS_BITS);
                    (unit - offset % unit).min(inside)
                }
                Err(error) => return Err(error),
            };
            if found < inside {
                work.push((layer, offset + found, inside - found));
            }
        }
        runs.sort_unstable_by_key(|run| run.start);
        runs.dedup_by(|next, run| goes_on(run, next));
        Ok(runs.into_boxed_slice())
    }
}

fn size(runs: &[Run]) -> usize {
    OVERHEAD + size_of_val(runs)
}

/// Whether `next`, which begins where `run` ends, can be said with it.
fn goes_on(run: &Run, next: &Run) -> bool {
    let alike = (run.what, run.layer) == (next.what, next.layer);
    alike
        && match run.what {
            What::Nothing | What::Zero | What::Unknown => true,
            What::Data => run.host + u64::from(next.start - run.start) == next.host,
            What::Compressed => false,
        }
}
