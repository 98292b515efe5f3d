//! Whether guest kernel and agent are what they should be, and whole.
//!
//! A download that broke off or a package of another architecture gives a guest that never answers. The headers say so
//! before anything boots: every part that they promise must lie within the file.

use std::{
    fs::File,
    io::{self, Read},
    path::Path,
};

use config::Paths;

use super::Check;

/// Largest image that is looked at.
const SIZE_MAX: u64 = 512 << 20;

/// ELF: little-endian, 64 bits, and the number of x86_64.
const ELF: &[u8] = b"\x7fELF\x02\x01";
const X86_64: u64 = 62;
const PT_LOAD: u64 = 1;

/// newc: the header's length, and the name that ends an archive.
const NEWC_HEADER: usize = 110;
const NEWC_END: &[u8] = b"TRAILER!!!";

/// Both images.
pub fn checks(paths: &Paths) -> Vec<Check> {
    vec![
        check("guest-kernel", "paths.kernel", &paths.kernel, kernel),
        check("guest-agent", "paths.agent", &paths.agent, agent),
    ]
}

fn check(name: &'static str, key: &str, file: &Path, judge: fn(&[u8]) -> Result<String, String>) -> Check {
    let judged = read(file).map_err(|error| error.to_string()).and_then(|bytes| judge(&bytes));
    match judged {
        Ok(what) => Check::pass(name, format!("{}: {what}", file.display())),
        Err(what) => {
            let fix = format!("install nacre again (make install), or set {key} in its configuration");
            Check::fail(name, format!("{}: {what}", file.display()), fix)
        }
    }
}

fn read(file: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(file)?.take(SIZE_MAX).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn kernel(bytes: &[u8]) -> Result<String, String> {
    let loaded = elf(bytes)?;
    Ok(format!("x86_64 ELF, {} MiB", loaded >> 20))
}

/// The bytes that an x86_64 ELF puts into memory, if all of them are there.
fn elf(bytes: &[u8]) -> Result<u64, String> {
    if !bytes.starts_with(ELF) {
        return Err("not an ELF file of 64 bits".into());
    }
    let cut = || format!("cut off: it ends after {} bytes", bytes.len());
    let number = |at: u64, length: usize| little(bytes, at, length).ok_or_else(cut);
    let machine = number(18, 2)?;
    if machine != X86_64 {
        return Err(format!("made for another architecture than x86_64 (ELF machine {machine})"));
    }
    let (table, size, count) = (number(32, 8)?, number(54, 2)?, number(56, 2)?);
    let mut loaded = 0u64;
    for index in 0..count {
        let entry = table.saturating_add(index * size);
        if number(entry, 4)? != PT_LOAD {
            continue;
        }
        let (offset, length) = (number(entry.saturating_add(8), 8)?, number(entry.saturating_add(32), 8)?);
        if offset.checked_add(length).is_none_or(|end| end > bytes.len() as u64) {
            return Err(cut());
        }
        loaded = loaded.saturating_add(length);
    }
    if loaded == 0 { Err("an ELF file without anything to load".into()) } else { Ok(loaded) }
}

fn little(bytes: &[u8], at: u64, length: usize) -> Option<u64> {
    let at = usize::try_from(at).ok()?;
    let field = bytes.get(at..at.checked_add(length)?)?;
    Some(field.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte)))
}

/// An uncompressed newc archive with an executable `init`, and its end.
fn agent(bytes: &[u8]) -> Result<String, String> {
    if !bytes.starts_with(b"070701") {
        return Err("not an uncompressed newc cpio archive".into());
    }
    let (mut at, mut init) = (0, None);
    loop {
        let cut = || format!("cut off: it ends after {} bytes", bytes.len());
        let (name, content, next) = member(bytes, at).ok_or_else(cut)?;
        if name == NEWC_END {
            break;
        }
        if name == b"init" || name == b"/init" {
            init = Some(content);
        }
        at = next;
    }
    let init = init.ok_or("an archive without an init")?;
    elf(init).map_err(|what| format!("its init is {what}"))?;
    Ok(format!("initramfs, init of {} KiB", init.len() >> 10))
}

/// Name and content of the member at `at`, and where the next begins.
fn member(bytes: &[u8], at: usize) -> Option<(&[u8], &[u8], usize)> {
    let header = bytes.get(at..at.checked_add(NEWC_HEADER)?).filter(|header| header.starts_with(b"070701"))?;
    // Thirteen hexadecimal numbers of eight digits after the magic: the 7th is the size, the 12th the name's.
    let field = |index: usize| {
        let digits = std::str::from_utf8(&header[6 + 8 * index..14 + 8 * index]).ok()?;
        usize::from_str_radix(digits, 16).ok()
    };
    let (size, name_size) = (field(6)?, field(11)?);
    let name = bytes.get(at + NEWC_HEADER..(at + NEWC_HEADER).checked_add(name_size)?)?;
    let start = (at + NEWC_HEADER + name_size).next_multiple_of(4);
    let content = bytes.get(start..start.checked_add(size)?)?;
    Some((name.strip_suffix(b"\0")?, content, (start + size).next_multiple_of(4)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An ELF of one segment of `length` bytes.
    fn tiny_elf(machine: u16, length: u64) -> Vec<u8> {
        let mut bytes = vec![0; 64 + 56];
        bytes[..6].copy_from_slice(ELF);
        bytes[18..20].copy_from_slice(&machine.to_le_bytes());
        bytes[32] = 64;
        bytes[54] = 56;
        bytes[56] = 1;
        bytes[64] = 1;
        bytes[72] = 120;
        bytes[96..104].copy_from_slice(&length.to_le_bytes());
        bytes.resize(120 + length as usize, 7);
        bytes
    }

    fn archive(members: &[(&str, &[u8])]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for (name, content) in members.iter().chain(&[("TRAILER!!!", &[][..])]) {
            let mut fields = [0; 13];
            (fields[6], fields[11]) = (content.len(), name.len() + 1);
            bytes.extend(b"070701");
            bytes.extend(fields.iter().flat_map(|field| format!("{field:08X}").into_bytes()));
            bytes.extend(format!("{name}\0").bytes());
            bytes.resize(bytes.len().next_multiple_of(4), 0);
            bytes.extend(*content);
            bytes.resize(bytes.len().next_multiple_of(4), 0);
        }
        bytes
    }

    #[test]
    fn whole_kernel_passes_and_every_shorter_one_is_cut_off() {
        let whole = tiny_elf(62, 50);
        kernel(&whole).expect("whole");
        for length in 0..whole.len() {
            kernel(&whole[..length]).expect_err("cut off");
        }
    }

    #[test]
    fn kernel_of_another_architecture_or_kind_is_named() {
        assert!(kernel(&tiny_elf(183, 50)).expect_err("arm").contains("another architecture"));
        assert!(kernel(b"MZ bzImage").expect_err("bzImage").contains("not an ELF"));
        assert!(kernel(&tiny_elf(62, 0)).is_err());
    }

    #[test]
    fn whole_archive_passes_and_every_shorter_one_is_cut_off() {
        let whole = archive(&[("dev", b""), ("init", &tiny_elf(62, 50))]);
        agent(&whole).expect("whole");
        for length in 0..whole.len() {
            agent(&whole[..length]).expect_err("cut off");
        }
    }

    #[test]
    fn archive_needs_an_init_that_can_run() {
        assert!(agent(&archive(&[("dev", b"")])).expect_err("none").contains("without an init"));
        assert!(agent(&archive(&[("init", b"#!/bin/sh")])).expect_err("a script").contains("its init is not an ELF"));
        assert!(agent(&tiny_elf(62, 50)).expect_err("an ELF").contains("newc cpio"));
    }

    #[test]
    fn hostile_numbers_in_headers_are_survived() {
        for at in 0..120 {
            let mut bytes = tiny_elf(62, 50);
            for byte in bytes.iter_mut().skip(at).take(8) {
                *byte = 0xff;
            }
            let _ = kernel(&bytes);
            let mut bytes = archive(&[("init", &tiny_elf(62, 50))]);
            for byte in bytes.iter_mut().skip(at).take(8) {
                *byte = b'F';
            }
            let _ = agent(&bytes);
        }
    }
}
