//! Features, configuration space and statistics (virtio 1.2 §5.5).

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Feature bits (§5.5.3).
pub mod feature {
    /// VIRTIO_BALLOON_F_STATS_VQ: the driver tells statistics.
    pub const STATS_VQ: u64 = 1 << 1;
    /// VIRTIO_BALLOON_F_DEFLATE_ON_OOM: the driver takes pages back before it kills anybody.
    pub const DEFLATE_ON_OOM: u64 = 1 << 2;
    /// VIRTIO_BALLOON_F_PAGE_REPORTING: the driver tells which pages are free.
    pub const PAGE_REPORTING: u64 = 1 << 5;
}

/// Bytes of a balloon page, whatever the guest's pages are.
pub const PAGE_BYTES: u64 = 4096;

/// The configuration space (§5.5.4).
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Config {
    /// Pages that the driver is asked to give up.
    pub num_pages: U32,
    /// Pages that it has given up.
    pub actual: U32,
}

/// Where `actual`, the only field that a driver writes, lies.
pub const ACTUAL_OFFSET: u64 = 4;

/// One statistic (§5.5.6.3.1).
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, packed)]
pub struct Statistic {
    /// Which.
    pub tag: U16,
    /// Bytes, or a count.
    pub value: U64,
}

/// What a queue is for: those of features that were not negotiated are left out of the row (§5.5.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Pages that the driver gives up.
    Inflate,
    /// Pages that it takes back.
    Deflate,
    /// Statistics.
    Statistics,
    /// Pages that are free for the moment.
    Reporting,
}

impl Role {
    /// The role of queue `index` with these negotiated features.
    #[must_use]
    pub fn of(index: u16, features: u64) -> Option<Self> {
        let rest = [
            (feature::STATS_VQ, Self::Statistics),
            (feature::PAGE_REPORTING, Self::Reporting),
        ];
        [Self::Inflate, Self::Deflate]
            .into_iter()
            .chain(
                rest.into_iter()
                    .filter(|(feature, _)| features & feature != 0)
                    .map(|(_, role)| role),
            )
            .nth(index.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_of_features_that_are_missing_are_left_out_of_the_row() {
        let both = feature::STATS_VQ | feature::PAGE_REPORTING;
        assert_eq!(Role::of(0, 0), Some(Role::Inflate));
        assert_eq!(Role::of(1, both), Some(Role::Deflate));
        assert_eq!(Role::of(2, both), Some(Role::Statistics));
        assert_eq!(Role::of(3, both), Some(Role::Reporting));
        assert_eq!(Role::of(2, feature::PAGE_REPORTING), Some(Role::Reporting));
        assert_eq!(Role::of(2, 0), None);
        assert_eq!(size_of::<Statistic>(), 10);
    }
}
