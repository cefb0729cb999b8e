//! A map whose entries stand in lists, each in the order of their last use: looking up, moving and evicting take the same time however
//! many there are.
//!
//! ```text
//!  key ──index──> slot   list 0:  oldest <─> … <─> newest
//!                        list 1:  oldest <─> … <─> newest
//! ```

use std::collections::HashMap;

/// Lists of a map; what they mean is the user's choice.
pub(crate) const LISTS: usize = 3;

/// No slot.
const NONE: usize = usize::MAX;

struct Slot<V> {
    key: u64,
    /// `None` while the slot is free.
    value: Option<V>,
    list: usize,
    older: usize,
    newer: usize,
}

#[derive(Clone, Copy)]
struct List {
    oldest: usize,
    newest: usize,
    length: usize,
}

/// See the module.
pub(crate) struct Lru<V> {
    index: HashMap<u64, usize>,
    slots: Vec<Slot<V>>,
    free: Vec<usize>,
    lists: [List; LISTS],
}

impl<V> Default for Lru<V> {
    fn default() -> Self {
        const EMPTY: List = List {
            oldest: NONE,
            newest: NONE,
            length: 0,
        };
        Self {
            index: HashMap::new(),
            slots: Vec::new(),
            free: Vec::new(),
            lists: [EMPTY; LISTS],
        }
    }
}

impl<V> Lru<V> {
    pub(crate) fn contains(&self, key: u64) -> bool {
        self.index.contains_key(&key)
    }

    /// An entry, without using it.
    pub(crate) fn peek(&self, key: u64) -> Option<&V> {
        let slot = self.slots.get(*self.index.get(&key)?)?;
        slot.value.as_ref()
    }

    /// An entry, which becomes the newest of its list.
    pub(crate) fn get(&mut self, key: u64) -> Option<&mut V> {
        let place = *self.index.get(&key)?;
        let list = self.slots.get(place)?.list;
        self.move_last(place, list);
        self.slots.get_mut(place)?.value.as_mut()
    }

    /// [`Lru::get`] of an entry that changes to another list.
    pub(crate) fn get_into(&mut self, key: u64, list: usize) -> Option<&mut V> {
        let place = *self.index.get(&key)?;
        self.move_last(place, list);
        self.slots.get_mut(place)?.value.as_mut()
    }

    /// Adds an entry, in place of one that has the same key.
    pub(crate) fn insert(&mut self, key: u64, value: V, list: usize) {
        self.remove(key);
        let slot = Slot {
            key,
            value: Some(value),
            list,
            older: NONE,
            newer: NONE,
        };
        let place = match self.free.pop() {
            Some(place) => {
                if let Some(old) = self.slots.get_mut(place) {
                    *old = slot;
                }
                place
            }
            None => {
                self.slots.push(slot);
                self.slots.len() - 1
            }
        };
        self.index.insert(key, place);
        self.link(place, list);
    }

    pub(crate) fn remove(&mut self, key: u64) -> Option<V> {
        let place = self.index.remove(&key)?;
        self.unlink(place);
        self.free.push(place);
        self.slots.get_mut(place)?.value.take()
    }

    /// The key of the entry of a list that was not used for the longest time.
    pub(crate) fn oldest(&self, list: usize) -> Option<u64> {
        let list = self.lists.get(list)?;
        self.slots.get(list.oldest).map(|slot| slot.key)
    }

    /// Number of entries of a list.
    pub(crate) fn length(&self, list: usize) -> usize {
        self.lists.get(list).map_or(0, |list| list.length)
    }

    /// The keys of a list, oldest first.
    pub(crate) fn keys(&self, list: usize) -> impl Iterator<Item = u64> {
        let first = self.lists.get(list).map_or(NONE, |list| list.oldest);
        std::iter::successors(self.slots.get(first), |slot| self.slots.get(slot.newer))
            .map(|slot| slot.key)
    }

    fn move_last(&mut self, place: usize, list: usize) {
        if self.lists.get(list).is_some_and(|l| l.newest == place) {
            return;
        }
        self.unlink(place);
        self.link(place, list);
    }

    fn unlink(&mut self, place: usize) {
        let Some(slot) = self.slots.get(place) else {
            return;
        };
        let (older, newer, list) = (slot.older, slot.newer, slot.list);
        if let Some(slot) = self.slots.get_mut(older) {
            slot.newer = newer;
        }
        if let Some(slot) = self.slots.get_mut(newer) {
            slot.older = older;
        }
        if let Some(list) = self.lists.get_mut(list) {
            if list.oldest == place {
                list.oldest = newer;
            }
            if list.newest == place {
                list.newest = older;
            }
            list.length -= 1;
        }
    }

    fn link(&mut self, place: usize, list: usize) {
        let Some(ends) = self.lists.get_mut(list) else {
            return;
        };
        let older = std::mem::replace(&mut ends.newest, place);
        if older == NONE {
            ends.oldest = place;
        }
        ends.length += 1;
        if let Some(slot) = self.slots.get_mut(older) {
            slot.newer = place;
        }
        if let Some(slot) = self.slots.get_mut(place) {
            (slot.list, slot.older, slot.newer) = (list, older, NONE);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn it_is_a_map_with_lists_in_order_of_use(steps in proptest::collection::vec((0u8..5, 0u64..8, 0usize..LISTS), 0..200)) {
            let mut lru = Lru::default();
            // (key, value, list), least recently used first.
            let mut model: Vec<(u64, usize, usize)> = Vec::new();
            for (number, (step, key, list)) in steps.into_iter().enumerate() {
                let found = model.iter().position(|entry| entry.0 == key);
                let old = found.map(|at| model.remove(at));
                match step {
                    0 | 1 => {
                        lru.insert(key, number, list);
                        model.push((key, number, list));
                    }
                    2 => {
                        prop_assert_eq!(lru.get(key).copied(), old.map(|entry| entry.1));
                        model.extend(old);
                    }
                    3 => {
                        prop_assert_eq!(lru.get_into(key, list).copied(), old.map(|entry| entry.1));
                        model.extend(old.map(|entry| (entry.0, entry.1, list)));
                    }
                    _ => prop_assert_eq!(lru.remove(key), old.map(|entry| entry.1)),
                }
                for list in 0..LISTS {
                    let wanted: Vec<u64> = model.iter().filter(|e| e.2 == list).map(|e| e.0).collect();
                    prop_assert_eq!(lru.oldest(list), wanted.first().copied());
                    prop_assert_eq!(lru.length(list), wanted.len());
                    prop_assert_eq!(lru.keys(list).collect::<Vec<_>>(), wanted);
                }
                for key in 0..8 {
                    let wanted = model.iter().find(|entry| entry.0 == key).map(|entry| entry.1);
                    prop_assert_eq!(lru.peek(key).copied(), wanted);
                    prop_assert_eq!(lru.contains(key), wanted.is_some());
                }
            }
        }
    }
}
