//! A file is a room with one noun on the door, and small enough to be seen at once.

use super::{read, sources};

/// Names that say nothing.
const NO_NOUNS: [&str; 6] = ["util", "utils", "common", "helper", "helpers", "manager"];

/// Lines after which a room should be two. The aim is 150 to 250; a list of test sentences may be longer.
const MAX_LINES: usize = 450;
const MAX_TEST_LINES: usize = 550;

#[test]
fn no_room_is_called_by_a_word_that_says_nothing() {
    for source in sources() {
        for part in source.iter() {
            let name = part.to_string_lossy();
            let noun = name.trim_end_matches(".rs");
            assert!(!NO_NOUNS.contains(&noun), "{}: name it by what it holds", source.display());
        }
    }
}

#[test]
fn no_room_is_larger_than_it_should_be() {
    for source in sources() {
        let lines = read(&source).lines().count();
        let is_test = source.iter().any(|part| part == "tests" || part == "tests.rs");
        let most = if is_test { MAX_TEST_LINES } else { MAX_LINES };
        assert!(lines <= most, "{}: {lines} lines; make two rooms of it", source.display());
    }
}

#[test]
fn every_room_says_what_it_is() {
    for source in sources() {
        let text = read(&source);
        let first = text.lines().find(|line| !line.is_empty() && !line.starts_with("#!["));
        let said = first.is_some_and(|line| line.starts_with("//!"));
        assert!(said, "{}: open it with a //! paragraph", source.display());
    }
}
