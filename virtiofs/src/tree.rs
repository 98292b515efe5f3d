//! The tree of nodes: what the guest knows, without a single descriptor or system call.
//!
//! A **node** is one file that the guest has looked up and not yet forgotten. It is found by number (what the guest
//! says), by **key** (share, device, inode: so that two hard links are one node, as the guest's kernel expects) and by
//! **place** (parent node and name: how it is opened again).
//!
//! Invariants, held by every method and checked by the property test at the end:
//! * A node other than the root exists exactly as long as its lookup count is above zero or some place names it as
//!   the parent. Children hold their parents, so a FORGET that arrives in any order leaves every remaining node with
//!   a complete way up.
//! * A place belongs to one node, and that node lists it. A directory has at most one place; another file has any
//!   number, none once its last known name is gone.
//! * The way up never meets a node twice. The host may move directories about while the guest holds the old picture,
//!   so a place that would close a ring is refused or forgotten instead of recorded.
//! * A node number is never given out twice, so an answer meant for a forgotten node cannot reach another file.
//!
//! Failure paths: a full tree is [`Refusal::Full`], a parent that is not (or no longer) known, or a ring, is
//! [`Refusal::Stale`]. A count or a number that the guest made up changes nothing.

use std::collections::HashMap;
use std::ffi::CStr;
use std::sync::Arc;

/// A node's number: what FUSE calls the node id. [`ROOT`] is the directory of shares.
pub(crate) type NodeId = u64;

/// Which attachment a node belongs to. Never reused, so a name attached again is another share.
pub(crate) type ShareId = u64;

/// The directory in which shares appear by name.
pub(crate) const ROOT: NodeId = fuse_backend_rs::api::filesystem::ROOT_ID;

/// What makes a file this file and not another, as long as it exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct FileKey {
    pub share: ShareId,
    pub dev: u64,
    pub ino: u64,
}

/// Where a file was last seen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub parent: NodeId,
    pub name: Arc<CStr>,
}

/// What a file's data looked like when the guest last opened it: as long as it looks the same, the guest's page
/// cache is still good.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Version {
    pub seconds: i64,
    pub nanoseconds: u32,
    pub size: u64,
}

/// One file that the guest holds.
#[derive(Debug)]
pub(crate) struct Node {
    pub key: FileKey,
    /// The `S_IFMT` bits: an inode number that comes back as another kind of file is another file.
    pub kind: u32,
    /// True for what was attached: it has no place, its share holds its descriptor.
    pub share_root: bool,
    pub places: Vec<Place>,
    pub opened_as: Option<Version>,
    lookups: u64,
}

/// Why a file could not be recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The guest holds as many nodes as the limit allows.
    Full,
    /// The parent is unknown or no directory, or the place would close a ring.
    Stale,
}

/// All nodes of one device.
#[derive(Debug)]
pub(crate) struct Tree {
    nodes: HashMap<NodeId, Node>,
    by_key: HashMap<FileKey, NodeId>,
    /// Only directories with known children have an entry here.
    children: HashMap<NodeId, HashMap<Arc<CStr>, NodeId>>,
    next: NodeId,
    capacity: usize,
    /// Nodes that are gone and whose descriptors the caller has yet to close.
    freed: Vec<NodeId>,
}

impl Tree {
    /// An empty tree that will hold at most `capacity` nodes.
    pub fn new(capacity: usize) -> Tree {
        Tree {
            nodes: HashMap::new(),
            by_key: HashMap::new(),
            children: HashMap::new(),
            next: ROOT + 1,
            capacity,
            freed: Vec::new(),
        }
    }

    /// The nodes that went since the last call: their descriptors are no longer wanted.
    pub fn take_freed(&mut self) -> Vec<NodeId> {
        std::mem::take(&mut self.freed)
    }

    pub fn get(&self, id: NodeId) -> Option<&Node> {
        self.nodes.get(&id)
    }

    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    pub fn child(&self, parent: NodeId, name: &CStr) -> Option<NodeId> {
        self.children.get(&parent)?.get(name).copied()
    }

    /// Forgets everything; numbers go on counting, so that late messages meet nothing.
    pub fn clear(&mut self) {
        self.nodes.clear();
        self.by_key.clear();
        self.children.clear();
        self.freed.clear();
    }

    /// Records that the guest looked up what a share serves.
    pub fn enter_share(&mut self, key: FileKey, kind: u32) -> Result<NodeId, Refusal> {
        let id = match self.same_file(key, kind) {
            Some(id) => id,
            None => self.add(key, kind)?,
        };
        if let Some(node) = self.nodes.get_mut(&id) {
            node.share_root = true;
            node.lookups += 1;
        }
        Ok(id)
    }

    /// Records that the guest looked up `name` in `parent` and that this is the file it found.
    pub fn enter(&mut self, parent: NodeId, name: &CStr, key: FileKey, kind: u32) -> Result<NodeId, Refusal> {
        // Held meanwhile: what is displaced on the way may be all that holds the parent.
        let held = self.nodes.get_mut(&parent).filter(|node| node.kind == libc::S_IFDIR).ok_or(Refusal::Stale)?;
        held.lookups += 1;
        let entered = self.place(parent, name, key, kind);
        if let Ok(id) = entered
            && let Some(node) = self.nodes.get_mut(&id)
        {
            node.lookups += 1;
        }
        self.forget(parent, 1);
        entered
    }

    /// Records a file that was just made and has no name yet. Whatever had its inode number is gone.
    pub fn enter_nameless(&mut self, key: FileKey, kind: u32) -> Result<NodeId, Refusal> {
        if let Some(&gone) = self.by_key.get(&key) {
            self.disown(gone, key);
        }
        let id = self.add(key, kind)?;
        if let Some(node) = self.nodes.get_mut(&id) {
            node.lookups += 1;
        }
        Ok(id)
    }

    fn place(&mut self, parent: NodeId, name: &CStr, key: FileKey, kind: u32) -> Result<NodeId, Refusal> {
        let before = self.child(parent, name);
        let id = match self.same_file(key, kind) {
            Some(id) => id,
            None => self.add(key, kind)?,
        };
        if before != Some(id) {
            if self.is_above(id, parent) {
                return Err(Refusal::Stale);
            }
            self.settle(id, parent, Arc::from(name));
        }
        Ok(id)
    }

    /// Records that a name is gone. The node stays for as long as the guest holds it.
    pub fn unlinked(&mut self, parent: NodeId, name: &CStr) {
        self.unseat(parent, name);
        self.free_if_unused(parent);
    }

    /// Records a rename; what was at the target loses that place.
    pub fn renamed(&mut self, from: (NodeId, &CStr), to: (NodeId, &CStr)) {
        let moved = self.unseat(from.0, from.1);
        self.unseat(to.0, to.1);
        self.settle_if_known(moved, to);
        self.free_if_unused(from.0);
        self.free_if_unused(to.0);
    }

    /// Records that two names changed places.
    pub fn exchanged(&mut self, one: (NodeId, &CStr), other: (NodeId, &CStr)) {
        let first = self.unseat(one.0, one.1);
        let second = self.unseat(other.0, other.1);
        self.settle_if_known(first, other);
        self.settle_if_known(second, one);
        self.free_if_unused(one.0);
        self.free_if_unused(other.0);
    }

    /// Takes `count` lookups back.
    pub fn forget(&mut self, id: NodeId, count: u64) {
        if let Some(node) = self.nodes.get_mut(&id) {
            // More than was given out is the guest's mistake; nothing of ours may wrap because of it.
            node.lookups = node.lookups.saturating_sub(count);
            self.free_if_unused(id);
        }
    }

    /// Remembers what the file looked like at this open; true if it looked just the same at the one before.
    pub fn opened(&mut self, id: NodeId, version: Version) -> bool {
        self.nodes.get_mut(&id).is_some_and(|node| node.opened_as.replace(version) == Some(version))
    }

    /// The node of this key, unless the number was reused for another kind of file.
    fn same_file(&mut self, key: FileKey, kind: u32) -> Option<NodeId> {
        let id = *self.by_key.get(&key)?;
        if self.nodes.get(&id).is_some_and(|node| node.kind == kind) {
            return Some(id);
        }
        self.disown(id, key);
        None
    }

    /// The inode number is another file's now: the node is left without key and places, and whatever the guest still
    /// asks of it is stale.
    fn disown(&mut self, id: NodeId, key: FileKey) {
        self.by_key.remove(&key);
        let left = self.nodes.get_mut(&id).map(|node| std::mem::take(&mut node.places)).unwrap_or_default();
        for place in left {
            self.remove_child(place.parent, &place.name);
            self.free_if_unused(place.parent);
        }
    }

    fn add(&mut self, key: FileKey, kind: u32) -> Result<NodeId, Refusal> {
        if self.nodes.len() >= self.capacity {
            return Err(Refusal::Full);
        }
        let id = self.next;
        self.next += 1;
        let node = Node { key, kind, share_root: false, places: Vec::new(), opened_as: None, lookups: 0 };
        self.nodes.insert(id, node);
        self.by_key.insert(key, id);
        Ok(id)
    }

    /// True if `id` is `below` or one of its ancestors: giving `id` a place in `below` would close a ring.
    fn is_above(&self, id: NodeId, below: NodeId) -> bool {
        let mut at = below;
        loop {
            if at == id {
                return true;
            }
            match self.nodes.get(&at).and_then(|node| node.places.first()) {
                Some(place) => at = place.parent,
                None => return false,
            }
        }
    }

    /// Gives a node a place; a directory leaves the one it had, and another node that sat there leaves it.
    fn settle(&mut self, id: NodeId, parent: NodeId, name: Arc<CStr>) {
        self.unseat(parent, &name);
        let Some(node) = self.nodes.get_mut(&id) else { return };
        let is_directory = node.kind == libc::S_IFDIR;
        let left = if is_directory { node.places.pop() } else { None };
        node.places.push(Place { parent, name: Arc::clone(&name) });
        self.children.entry(parent).or_default().insert(name, id);
        if let Some(place) = left {
            self.remove_child(place.parent, &place.name);
            self.free_if_unused(place.parent);
        }
    }

    fn settle_if_known(&mut self, id: Option<NodeId>, at: (NodeId, &CStr)) {
        if let Some(id) = id
            && self.nodes.get(&at.0).is_some_and(|parent| parent.kind == libc::S_IFDIR)
            && !self.is_above(id, at.0)
        {
            self.settle(id, at.0, Arc::from(at.1));
        }
    }

    /// Takes a place from whatever node sits there.
    fn unseat(&mut self, parent: NodeId, name: &CStr) -> Option<NodeId> {
        let id = self.remove_child(parent, name)?;
        if let Some(node) = self.nodes.get_mut(&id) {
            node.places.retain(|place| place.parent != parent || *place.name != *name);
        }
        Some(id)
    }

    fn remove_child(&mut self, parent: NodeId, name: &CStr) -> Option<NodeId> {
        let names = self.children.get_mut(&parent)?;
        let id = names.remove(name)?;
        if names.is_empty() {
            self.children.remove(&parent);
        }
        Some(id)
    }

    /// Frees a node that nothing holds, and then whichever ancestors only it was holding.
    fn free_if_unused(&mut self, id: NodeId) {
        let mut waiting = vec![id];
        while let Some(id) = waiting.pop() {
            let unused = self.nodes.get(&id).is_some_and(|node| node.lookups == 0) && !self.children.contains_key(&id);
            if !unused {
                continue;
            }
            let Some(node) = self.nodes.remove(&id) else { continue };
            if self.by_key.get(&node.key) == Some(&id) {
                self.by_key.remove(&node.key);
            }
            for place in node.places {
                self.remove_child(place.parent, &place.name);
                waiting.push(place.parent);
            }
            self.freed.push(id);
        }
    }
}

#[cfg(test)]
#[path = "tree_tests.rs"]
mod tests;
