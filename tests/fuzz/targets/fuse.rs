//! Any guest of a share: requests of any bytes, in any order, on a small folder.
//!
//! The folder lies in `NACRE_FUZZ_SHARE`, which `run` mounts small and in a mount namespace where all else is read-only:
//! this target makes, renames and removes files as it likes, and looks for the way out of the share. What it would find
//! there is checked after every input.
#![no_main]

#[path = "../../../virtiofs/tests/device/mod.rs"]
mod device;

use std::{
    fs,
    path::{Path, PathBuf},
    sync::LazyLock,
};

use device::{Device, with_nul};
use fuse_backend_rs::abi::fuse_abi::InHeader;
use libfuzzer_sys::{
    arbitrary::{Result, Unstructured},
    fuzz_target,
};

const MAX_REQUESTS: usize = 24;
const MAX_TOKENS: usize = 24;

/// Names that a folder has, may have or must not have.
const NAMES: [&str; 12] =
    ["a", "b", "c", "share", "link", "", ".", "..", "b/c", "user.x", "security.capability", "trusted.overlay.opaque"];

/// Numbers at which something may turn over.
const EDGES: [u64; 8] = [0, u64::MAX, i64::MAX as u64, i64::MIN as u64, u32::MAX as u64, 1 << 20, 0o100_644, 0o040_755];

static PLACE: LazyLock<PathBuf> = LazyLock::new(|| {
    let place = std::env::var_os("NACRE_FUZZ_SHARE").expect("tests/fuzz/run gives NACRE_FUZZ_SHARE, a folder to spoil");
    let place = PathBuf::from(place);
    fs::write(place.join("outside"), "untouched").expect("write");
    place
});

/// The share as it is before each input.
fn make_share(place: &Path) -> PathBuf {
    let share = place.join("share");
    let _ = fs::remove_dir_all(&share);
    fs::create_dir_all(share.join("b")).expect("mkdir");
    fs::write(share.join("a"), "content").expect("write");
    std::os::unix::fs::symlink("../outside", share.join("link")).expect("symlink");
    share
}

fn is_untouched(place: &Path) -> bool {
    let beside = fs::read_dir(place).expect("readable").count();
    beside == 2 && fs::read(place.join("outside")).is_ok_and(|content| content == b"untouched")
}

/// A body of words, numbers and names in any order.
fn body(u: &mut Unstructured<'_>) -> Result<Vec<u8>> {
    let mut body = Vec::new();
    for _ in 0..u.int_in_range(0..=MAX_TOKENS)? {
        match u.int_in_range(0..=6)? {
            0 => body.extend(u64::from(u.arbitrary::<u8>()?).to_le_bytes()),
            1 => body.extend(u32::from(u.arbitrary::<u8>()?).to_le_bytes()),
            2 => body.extend(u.choose(&EDGES)?.to_le_bytes()),
            3 => body.extend(u.arbitrary::<u32>()?.to_le_bytes()),
            4 => body.extend(with_nul(u.choose(&NAMES)?)),
            5 => body.extend(u.bytes(u.len().min(8))?),
            _ => body.extend([0; 16]),
        }
    }
    Ok(body)
}

fn request(device: &Device, u: &mut Unstructured<'_>) -> Result<()> {
    // A few beyond the last one that Linux has.
    let opcode = if u.ratio(15, 16)? { u.int_in_range(0..=55)? } else { u.arbitrary()? };
    let nodeid = if u.ratio(15, 16)? { u.int_in_range(0..=7)? } else { u.arbitrary()? };
    let (uid, gid) = (u.int_in_range(0..=1)?, u.int_in_range(0..=1)?);
    let room = usize::from(u.arbitrary::<u16>()?) & 0x1fff;
    let lie = if u.ratio(1, 16)? { u.arbitrary::<i32>()? } else { 0 };
    let body = body(u)?;
    let honest = (size_of::<InHeader>() + body.len()) as u32;
    let header = InHeader { len: honest.wrapping_add_signed(lie), opcode, nodeid, uid, gid, ..InHeader::default() };
    device.send(header, &body, room);
    Ok(())
}

fuzz_target!(|bytes: &[u8]| {
    let mut u = Unstructured::new(bytes);
    let device = Device::serving(&make_share(&PLACE));
    device.init();
    let share = device.lookup(1, "share").expect("LOOKUP").nodeid;
    let _ = (device.lookup(share, "a"), device.lookup(share, "b"), device.lookup(share, "link"));
    for _ in 0..MAX_REQUESTS {
        if u.is_empty() || request(&device, &mut u).is_err() {
            break;
        }
    }
    // Whatever happened, the next guest is served, and finds nothing of the last one.
    device.init();
    assert_eq!(device.tree.in_use(), (0, 0));
    assert!(device.lookup(1, "share").is_ok());
    assert!(is_untouched(&PLACE), "a guest left its share");
});
