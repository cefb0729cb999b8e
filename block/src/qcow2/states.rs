//! The clusters that are on their way from one steady state to another, audited.
//!
//! | state | refcount in memory | entered | left |
//! |---|---|---|---|
//! | COW in flight | 1 | the allocator gave it out | linked: allocated; failed: free |
//! | discard in flight | its references, one or more too many | an entry was cleared in memory | durably cleared: punch pending, or allocated if others refer to it |
//! | punch pending | 1 | the cleared entry is durable | punched and refcount 0: free |
//!
//! Everything that is not listed is free or allocated, as its refcount says. A step that the table does not know is a mistake of the
//! engine: it would end with two owners of one cluster, so writing stops there.

use std::collections::HashMap;
use std::ops::Range;

/// A state that does not last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Transit {
    CowInFlight,
    DiscardInFlight,
    PunchPending,
}

/// Clusters in such states, by number.
#[derive(Default)]
pub(super) struct InFlight(HashMap<u64, Transit>);

/// A step out of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct WrongStep {
    pub(super) cluster: u64,
    pub(super) from: Option<Transit>,
    pub(super) to: Option<Transit>,
}

impl InFlight {
    /// Takes clusters to another state; `None` is a steady one.
    pub(super) fn step(
        &mut self,
        clusters: Range<u64>,
        to: Option<Transit>,
    ) -> Result<(), WrongStep> {
        for cluster in clusters {
            let from = self.0.get(&cluster).copied();
            if !is_known(from, to) {
                return Err(WrongStep { cluster, from, to });
            }
            match to {
                Some(state) => self.0.insert(cluster, state),
                None => self.0.remove(&cluster),
            };
        }
        Ok(())
    }

    /// Number of clusters in no steady state.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }
}

fn is_known(from: Option<Transit>, to: Option<Transit>) -> bool {
    use Transit::{CowInFlight, DiscardInFlight, PunchPending};
    matches!(
        (from, to),
        // A cluster of compressed data loses several references before the first is gone.
        (None, Some(CowInFlight))
            | (None | Some(DiscardInFlight), Some(DiscardInFlight))
            | (Some(DiscardInFlight), Some(PunchPending))
            | (Some(_), None)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cluster_that_is_on_its_way_is_given_to_nobody() {
        let mut list = InFlight::default();
        list.step(4..6, Some(Transit::DiscardInFlight)).unwrap();
        list.step(4..5, Some(Transit::PunchPending)).unwrap();
        for cluster in 4..6 {
            assert!(
                list.step(cluster..cluster + 1, Some(Transit::CowInFlight))
                    .is_err()
            );
        }
        list.step(4..6, None).unwrap();
        list.step(4..6, Some(Transit::CowInFlight)).unwrap();
        assert!(list.step(5..6, Some(Transit::DiscardInFlight)).is_err());
        list.step(4..6, None).unwrap();
        assert_eq!(list.len(), 0);
        assert!(list.step(4..5, None).is_err(), "it was not on its way");
    }
}
