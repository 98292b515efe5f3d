//! Tests of the tree alone: its rules one by one, then its invariants under any sequence of calls.

use std::collections::HashSet;
use std::ffi::CString;

use proptest::prelude::*;

use super::*;

const DIR: u32 = libc::S_IFDIR;
const FILE: u32 = libc::S_IFREG;

fn key(ino: u64) -> FileKey {
    FileKey { share: 1, dev: 7, ino }
}

fn a_tree_with_a_share() -> (Tree, NodeId) {
    let mut tree = Tree::new(64);
    let top = tree.enter_share(key(1), DIR).expect("room for the share");
    (tree, top)
}

#[test]
fn two_hard_links_are_one_node_with_two_places() {
    let (mut tree, top) = a_tree_with_a_share();
    let a = tree.enter(top, c"a", key(2), FILE).expect("a");
    let b = tree.enter(top, c"b", key(2), FILE).expect("b");
    assert_eq!(a, b);
    assert_eq!(tree.get(a).expect("known").places.len(), 2);
    tree.unlinked(top, c"a");
    assert_eq!(tree.get(a).expect("known").places.len(), 1);
}

#[test]
fn a_name_that_means_another_file_is_taken_from_the_first() {
    let (mut tree, top) = a_tree_with_a_share();
    let old = tree.enter(top, c"a", key(2), FILE).expect("old");
    let new = tree.enter(top, c"a", key(3), FILE).expect("new");
    assert_ne!(old, new);
    assert!(tree.get(old).expect("still held").places.is_empty());
    assert_eq!(tree.child(top, c"a"), Some(new));
}

#[test]
fn an_inode_number_that_comes_back_as_another_kind_of_file_is_another_node() {
    let (mut tree, top) = a_tree_with_a_share();
    let file = tree.enter(top, c"a", key(2), FILE).expect("file");
    let directory = tree.enter(top, c"b", key(2), DIR).expect("directory");
    assert_ne!(file, directory);
    assert!(tree.get(file).expect("still held").places.is_empty());
    tree.forget(file, 1);
    assert_eq!(tree.enter(top, c"b", key(2), DIR), Ok(directory), "the old node's end takes nothing from the new one");
}

#[test]
fn a_parent_that_is_forgotten_first_stays_until_its_children_go() {
    let (mut tree, top) = a_tree_with_a_share();
    let dir = tree.enter(top, c"dir", key(2), DIR).expect("dir");
    let file = tree.enter(dir, c"file", key(3), FILE).expect("file");
    tree.forget(top, 1);
    tree.forget(dir, 1);
    assert_eq!(tree.len(), 3);
    assert!(tree.take_freed().is_empty());
    tree.forget(file, 1);
    assert_eq!(tree.len(), 0);
    assert_eq!(tree.take_freed(), [file, dir, top]);
}

#[test]
fn forgetting_more_than_was_looked_up_is_not_an_underflow() {
    let (mut tree, top) = a_tree_with_a_share();
    tree.forget(top, u64::MAX);
    tree.forget(top, 1);
    tree.forget(4711, 1);
    assert_eq!(tree.len(), 0);
}

#[test]
fn a_rename_moves_the_place_and_takes_the_targets() {
    let (mut tree, top) = a_tree_with_a_share();
    let a = tree.enter(top, c"a", key(2), FILE).expect("a");
    let b = tree.enter(top, c"b", key(3), FILE).expect("b");
    tree.renamed((top, c"a"), (top, c"b"));
    assert_eq!(tree.child(top, c"b"), Some(a));
    assert_eq!(tree.child(top, c"a"), None);
    assert!(tree.get(b).expect("still held").places.is_empty());
}

#[test]
fn an_exchange_swaps_two_places() {
    let (mut tree, top) = a_tree_with_a_share();
    let a = tree.enter(top, c"a", key(2), FILE).expect("a");
    let b = tree.enter(top, c"b", key(3), DIR).expect("b");
    tree.exchanged((top, c"a"), (top, c"b"));
    assert_eq!((tree.child(top, c"a"), tree.child(top, c"b")), (Some(b), Some(a)));
}

#[test]
fn a_directory_that_would_be_its_own_ancestor_is_refused() {
    let (mut tree, top) = a_tree_with_a_share();
    let outer = tree.enter(top, c"outer", key(2), DIR).expect("outer");
    let inner = tree.enter(outer, c"inner", key(3), DIR).expect("inner");
    // The host turned them inside out, and the guest asks through the node that it still holds.
    assert_eq!(tree.enter(inner, c"outer", key(2), DIR), Err(Refusal::Stale));
    assert_eq!(tree.enter(inner, c"self", key(3), DIR), Err(Refusal::Stale));
}

#[test]
fn a_full_tree_refuses_new_nodes_and_goes_on_with_those_it_has() {
    let mut tree = Tree::new(2);
    let top = tree.enter_share(key(1), DIR).expect("share");
    let a = tree.enter(top, c"a", key(2), FILE).expect("a");
    assert_eq!(tree.enter(top, c"b", key(3), FILE), Err(Refusal::Full));
    assert_eq!(tree.enter(top, c"a", key(2), FILE), Ok(a));
    tree.forget(a, 2);
    assert!(tree.enter(top, c"b", key(3), FILE).is_ok());
}

#[test]
fn a_file_made_without_a_name_is_not_the_one_that_had_its_inode_number() {
    let (mut tree, top) = a_tree_with_a_share();
    let old = tree.enter(top, c"a", key(2), FILE).expect("old");
    let new = tree.enter_nameless(key(2), FILE).expect("new");
    assert_ne!(old, new);
    assert!(tree.get(old).expect("still held").places.is_empty());
    assert_eq!(tree.enter(top, c"b", key(2), FILE), Ok(new), "it is named");
    tree.forget(new, 2);
    tree.forget(old, 1);
    assert_eq!(tree.take_freed(), [new, old]);
}

#[test]
fn a_file_that_looks_the_same_at_two_opens_is_recognised() {
    let (mut tree, top) = a_tree_with_a_share();
    let a = tree.enter(top, c"a", key(2), FILE).expect("a");
    let version = Version { seconds: 1, nanoseconds: 2, size: 3 };
    assert!(!tree.opened(a, version));
    assert!(tree.opened(a, version));
    assert!(!tree.opened(a, Version { size: 4, ..version }));
}

#[derive(Clone, Debug)]
enum Call {
    Enter { parent: usize, name: u8, ino: u64, dir: bool },
    Share,
    Nameless { ino: u64 },
    Unlinked { parent: usize, name: u8 },
    Renamed { from: (usize, u8), to: (usize, u8), exchange: bool },
    Forget { node: usize, count: u64 },
}

fn calls() -> impl Strategy<Value = Vec<Call>> {
    let place = || (0..8usize, 0..4u8);
    let call = prop_oneof![
        4 => (place(), 2..10u64, any::<bool>())
            .prop_map(|((parent, name), ino, dir)| Call::Enter { parent, name, ino, dir }),
        1 => Just(Call::Share),
        1 => (2..10u64).prop_map(|ino| Call::Nameless { ino }),
        2 => place().prop_map(|(parent, name)| Call::Unlinked { parent, name }),
        2 => (place(), place(), any::<bool>()).prop_map(|(from, to, exchange)| Call::Renamed { from, to, exchange }),
        2 => (0..8usize, 0..3u64).prop_map(|(node, count)| Call::Forget { node, count }),
    ];
    proptest::collection::vec(call, 0..200)
}

fn name(letter: u8) -> CString {
    CString::new(vec![b'a' + letter]).expect("a letter")
}

fn apply(tree: &mut Tree, known: &mut Vec<NodeId>, call: &Call) {
    let node = |index: usize| known.get(index % known.len().max(1)).copied().unwrap_or(99);
    let mut entered = None;
    match call {
        Call::Enter { parent, name: letter, ino, dir } => {
            entered = tree.enter(node(*parent), &name(*letter), key(*ino), if *dir { DIR } else { FILE }).ok();
        }
        Call::Share => entered = tree.enter_share(key(1), DIR).ok(),
        Call::Nameless { ino } => entered = tree.enter_nameless(key(*ino), FILE).ok(),
        Call::Unlinked { parent, name: letter } => tree.unlinked(node(*parent), &name(*letter)),
        Call::Renamed { from, to, exchange } => {
            let (old, new) = (name(from.1), name(to.1));
            let (from, to) = ((node(from.0), old.as_c_str()), (node(to.0), new.as_c_str()));
            if *exchange { tree.exchanged(from, to) } else { tree.renamed(from, to) }
        }
        Call::Forget { node: index, count } => tree.forget(node(*index), *count),
    }
    known.extend(entered.filter(|id| !known.contains(id)));
}

fn check(tree: &Tree) {
    for (id, node) in &tree.nodes {
        let held = node.lookups > 0 || tree.children.contains_key(id);
        assert!(held, "node {id} is held by nothing");
        if node.kind == DIR {
            assert!(node.places.len() <= 1, "directory {id} has several places");
        }
        for place in &node.places {
            assert_eq!(tree.child(place.parent, &place.name), Some(*id), "place and index disagree");
            assert!(tree.nodes.contains_key(&place.parent), "node {id} lost its parent");
        }
        let mut seen = HashSet::from([*id]);
        let mut at = node.places.first();
        while let Some(place) = at {
            assert!(seen.insert(place.parent), "the way up from {id} is a ring");
            at = tree.nodes.get(&place.parent).and_then(|parent| parent.places.first());
        }
    }
    for (parent, names) in &tree.children {
        assert!(!names.is_empty());
        for (name, id) in names {
            let listed = tree
                .nodes
                .get(id)
                .is_some_and(|node| node.places.iter().any(|place| place.parent == *parent && place.name == *name));
            assert!(listed, "node {id} does not list its place {name:?} in {parent}");
        }
    }
    for (key, id) in &tree.by_key {
        assert_eq!(tree.nodes.get(id).map(|node| node.key), Some(*key));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_sequence_of_calls_breaks_the_invariants(calls in calls()) {
        let mut tree = Tree::new(12);
        let mut known = vec![tree.enter_share(key(1), DIR).expect("share")];
        for call in &calls {
            apply(&mut tree, &mut known, call);
            check(&tree);
        }
        for node in known {
            tree.forget(node, u64::MAX);
        }
        prop_assert_eq!(tree.len(), 0, "everything was forgotten");
    }
}
