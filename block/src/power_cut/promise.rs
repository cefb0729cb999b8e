//! What a guest may rely on: for every sector the values that it may hold.

use std::collections::HashMap;

use super::guest::Deed;
use super::scene::SECTOR;

/// A value that a sector was given.
#[derive(Clone, Copy)]
struct Value {
    value: u8,
    deed: usize,
    weak: bool,
}

/// What each sector may hold after a cut.
pub(super) struct Promise<'a> {
    sectors: Vec<Vec<Value>>,
    deeds: &'a [Deed],
    over: Vec<bool>,
    /// Deeds that were over when a flush began.
    flushes: HashMap<usize, Vec<bool>>,
    grown: bool,
}

impl<'a> Promise<'a> {
    pub(super) fn new(initial: &[u8], deeds: &'a [Deed]) -> Self {
        let before = |value: &u8| {
            vec![Value {
                value: *value,
                deed: usize::MAX,
                weak: false,
            }]
        };
        Self {
            sectors: initial.iter().map(before).collect(),
            deeds,
            over: vec![false; deeds.len()],
            flushes: HashMap::new(),
            grown: false,
        }
    }

    pub(super) fn play(&mut self, deed: usize) {
        match &self.deeds[deed] {
            Deed::Set {
                sectors,
                value,
                weak,
            } => {
                for values in &mut self.sectors[sectors.clone()] {
                    values.push(Value {
                        value: *value,
                        deed,
                        weak: *weak,
                    });
                }
            }
            Deed::Flush => {
                self.flushes.insert(deed, self.over.clone());
            }
            Deed::Over(other) => {
                self.over[*other] = true;
                let Some(durable) = self.flushes.remove(other) else {
                    return;
                };
                for values in &mut self.sectors {
                    let is_durable = |v: &Value| !v.weak && durable.get(v.deed) == Some(&true);
                    let last = values.iter().rposition(is_durable).unwrap_or(0);
                    values.drain(..last);
                }
            }
            Deed::Grown => self.grown = true,
        }
    }

    pub(super) fn check(&self, seen: &[u8], what: &str) {
        assert!(
            !self.grown || seen.len() == self.sectors.len() * SECTOR,
            "{what}: a disk that has grown has {} bytes",
            seen.len()
        );
        for (n, (sector, values)) in seen.chunks(SECTOR).zip(&self.sectors).enumerate() {
            let good = values
                .iter()
                .any(|v| sector.iter().all(|byte| *byte == v.value));
            let values = || values.iter().map(|v| v.value).collect::<Vec<_>>();
            assert!(
                good,
                "{what}: sector {n} holds {} and not one of {:?}",
                sector[0],
                values()
            );
        }
    }
}
