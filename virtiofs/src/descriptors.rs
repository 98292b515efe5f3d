//! The descriptors that stand for nodes: how many there are is the host's choice, not the guest's.
//!
//! A node's descriptor is in one of three states:
//! * **cached**: it could be opened again by place, so it may be closed at any time. At most `capacity` of these.
//! * **orphan**: the last known name is gone, so nothing could open it again. It stays until the guest forgets the
//!   node, within `orphan_capacity`; beyond that an unlink still succeeds and the node answers ESTALE.
//! * **open**: a handle's own descriptor doubles as its node's. It goes with the handle.
//!
//! Invariants: a descriptor that somebody is using is never closed under them (they hold the `Arc`); nothing is kept
//! for a share that was detached, whoever loses the race (the flag is read under the same lock as [`release`] takes).
//!
//! [`release`]: Descriptors::release

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::share::Share;
use crate::tree::{NodeId, ShareId};

/// A descriptor in use: it stays open for as long as anyone holds it.
pub(crate) type Held = Arc<OwnedFd>;

struct Slot {
    node: NodeId,
    share: ShareId,
    held: Held,
    /// Used since the hand last came by: the hand passes once more before it closes this one.
    recent: bool,
}

struct Opened {
    handle: u64,
    share: ShareId,
    held: Held,
}

#[derive(Default)]
struct State {
    slots: Vec<Slot>,
    slot_of: HashMap<NodeId, usize>,
    hand: usize,
    orphans: HashMap<NodeId, (ShareId, Held)>,
    open: HashMap<NodeId, Vec<Opened>>,
}

/// All descriptors that stand for nodes.
///
/// "Least recently used" is a clock: a lookup only sets a bit, where a linked list would be rewritten at every
/// request.
pub(crate) struct Descriptors {
    state: Mutex<State>,
    capacity: usize,
    orphan_capacity: usize,
}

impl Descriptors {
    pub fn new(capacity: usize, orphan_capacity: usize) -> Descriptors {
        Descriptors { state: Mutex::default(), capacity: capacity.max(1), orphan_capacity }
    }

    /// The node's descriptor, if there is one in any state.
    pub fn get(&self, node: NodeId) -> Option<Held> {
        let mut state = self.lock();
        if let Some(&at) = state.slot_of.get(&node) {
            let slot = &mut state.slots[at];
            slot.recent = true;
            return Some(Arc::clone(&slot.held));
        }
        if let Some((_, held)) = state.orphans.get(&node) {
            return Some(Arc::clone(held));
        }
        state.open.get(&node)?.last().map(|opened| Arc::clone(&opened.held))
    }

    /// Caches a descriptor that a place led to, closing another one if need be.
    pub fn cache(&self, share: &Share, node: NodeId, held: &Held) {
        let mut state = self.lock();
        if !share.is_attached() || state.slot_of.contains_key(&node) {
            return;
        }
        let slot = Slot { node, share: share.id, held: Arc::clone(held), recent: true };
        let closed = if state.slots.len() < self.capacity {
            let at = state.slots.len();
            state.slots.push(slot);
            state.slot_of.insert(node, at);
            None
        } else {
            Some(state.replace_oldest(slot))
        };
        // Closing can be slow on a network file system; nobody else should wait for it.
        drop(state);
        drop(closed);
    }

    /// True if one more node may lose its last name and keep its descriptor.
    pub fn orphans_have_room(&self) -> bool {
        self.lock().orphans.len() < self.orphan_capacity
    }

    /// Keeps the descriptor of a node that has no name left.
    pub fn orphan(&self, share: &Share, node: NodeId, held: Held) {
        let mut state = self.lock();
        if share.is_attached() {
            state.uncache(node);
            state.orphans.insert(node, (share.id, held));
        }
    }

    /// A handle's descriptor stands for its node until [`closed`](Self::closed).
    pub fn opened(&self, share: &Share, node: NodeId, handle: u64, held: &Held) {
        let mut state = self.lock();
        if share.is_attached() {
            let opened = Opened { handle, share: share.id, held: Arc::clone(held) };
            state.open.entry(node).or_default().push(opened);
        }
    }

    pub fn closed(&self, node: NodeId, handle: u64) {
        let mut state = self.lock();
        if let Some(opened) = state.open.get_mut(&node) {
            opened.retain(|one| one.handle != handle);
            if opened.is_empty() {
                state.open.remove(&node);
            }
        }
    }

    /// The guest forgot these nodes.
    pub fn forgotten(&self, nodes: &[NodeId]) {
        if nodes.is_empty() {
            return;
        }
        let mut closed = Vec::new();
        let mut state = self.lock();
        for node in nodes {
            closed.extend(state.uncache(*node));
            closed.extend(state.orphans.remove(node).map(|(_, held)| held));
        }
        drop(state);
    }

    /// Closes what was only cached: the answer to EMFILE.
    pub fn shed(&self) {
        let mut state = self.lock();
        let closed = std::mem::take(&mut state.slots);
        state.slot_of.clear();
        drop(state);
        drop(closed);
    }

    /// Closes everything that stands for a node of this share.
    pub fn release(&self, share: ShareId) {
        let mut state = self.lock();
        let nodes: Vec<NodeId> = state.slots.iter().filter(|slot| slot.share == share).map(|slot| slot.node).collect();
        let closed: Vec<Option<Held>> = nodes.into_iter().map(|node| state.uncache(node)).collect();
        state.orphans.retain(|_, (of, _)| *of != share);
        state.open.retain(|_, opened| opened.iter().all(|one| one.share != share));
        drop(state);
        drop(closed);
    }

    /// Closes everything.
    pub fn clear(&self) {
        let all = std::mem::take(&mut *self.lock());
        drop(all);
    }

    /// How many descriptors there are: cached, orphan, open.
    #[cfg(test)]
    pub fn counts(&self) -> (usize, usize, usize) {
        let state = self.lock();
        (state.slots.len(), state.orphans.len(), state.open.values().map(Vec::len).sum())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Moves the hand to the first slot that was not used since it last came by, and puts the new one there.
    fn replace_oldest(&mut self, new: Slot) -> Held {
        loop {
            let at = self.hand % self.slots.len();
            self.hand = at + 1;
            if std::mem::take(&mut self.slots[at].recent) {
                continue;
            }
            self.slot_of.remove(&self.slots[at].node);
            self.slot_of.insert(new.node, at);
            return std::mem::replace(&mut self.slots[at], new).held;
        }
    }

    fn uncache(&mut self, node: NodeId) -> Option<Held> {
        let at = self.slot_of.remove(&node)?;
        let slot = self.slots.swap_remove(at);
        if let Some(moved) = self.slots.get(at) {
            self.slot_of.insert(moved.node, at);
        }
        Some(slot.held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::share::ShareOptions;

    fn a_descriptor() -> Held {
        Arc::new(std::fs::File::open("/dev/null").expect("/dev/null opens").into())
    }

    fn a_share(id: ShareId) -> Share {
        let root = a_descriptor();
        let found = crate::stat::of_descriptor(&root).expect("statx");
        Share::new(id, c"share".into(), root, ShareOptions::default(), &found)
    }

    #[test]
    fn no_more_are_cached_than_the_capacity_says() {
        let descriptors = Descriptors::new(4, 4);
        let share = a_share(1);
        for node in 2..100 {
            descriptors.cache(&share, node, &a_descriptor());
        }
        assert_eq!(descriptors.counts(), (4, 0, 0));
    }

    #[test]
    fn what_was_used_lately_outlives_what_was_not() {
        let descriptors = Descriptors::new(3, 4);
        let share = a_share(1);
        for node in [2, 3, 4, 5] {
            descriptors.cache(&share, node, &a_descriptor());
        }
        // The first full turn cleared every bit and closed 2; from here on only 3 is used.
        for node in [6, 7, 8] {
            assert!(descriptors.get(3).is_some(), "3 was closed although it is the one in use");
            descriptors.cache(&share, node, &a_descriptor());
        }
        assert!(descriptors.get(3).is_some());
    }

    #[test]
    fn a_forgotten_node_leaves_no_descriptor() {
        let descriptors = Descriptors::new(4, 4);
        let share = a_share(1);
        descriptors.cache(&share, 2, &a_descriptor());
        descriptors.cache(&share, 3, &a_descriptor());
        descriptors.orphan(&share, 4, a_descriptor());
        descriptors.forgotten(&[2, 3, 4, 5]);
        assert_eq!(descriptors.counts(), (0, 0, 0));
    }

    #[test]
    fn a_released_share_keeps_nothing_and_gets_nothing_new() {
        let descriptors = Descriptors::new(4, 4);
        let (gone, stays) = (a_share(1), a_share(2));
        for (node, share) in [(2, &gone), (3, &stays), (4, &gone)] {
            descriptors.cache(share, node, &a_descriptor());
            descriptors.orphan(share, node + 10, a_descriptor());
            descriptors.opened(share, node + 20, node, &a_descriptor());
        }
        gone.mark_detached();
        descriptors.release(gone.id);
        descriptors.cache(&gone, 5, &a_descriptor());
        descriptors.orphan(&gone, 6, a_descriptor());
        assert_eq!(descriptors.counts(), (1, 1, 1));
        assert!(descriptors.get(3).is_some() && descriptors.get(13).is_some() && descriptors.get(23).is_some());
    }

    #[test]
    fn an_open_handle_stands_for_its_node_until_it_is_closed() {
        let descriptors = Descriptors::new(4, 4);
        let share = a_share(1);
        descriptors.opened(&share, 2, 1, &a_descriptor());
        descriptors.opened(&share, 2, 2, &a_descriptor());
        descriptors.closed(2, 1);
        assert!(descriptors.get(2).is_some());
        descriptors.closed(2, 2);
        assert!(descriptors.get(2).is_none());
    }
}
