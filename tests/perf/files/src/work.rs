//! What is measured, each on a directory that was prepared behind the server's back.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{Advice, fadvise};

use super::Outcome;

const MIB: usize = 1 << 20;
const BIG: usize = 64;
const PAGE: usize = 4096;
const ACCESSES: u64 = 4000;

/// One kind of work.
pub struct Work {
    pub name: &'static str,
    act: fn(&Path) -> Outcome<()>,
}

pub const ALL: &[Work] = &[
    Work { name: "traverse 2048 files", act: traverse },
    Work { name: "read 64 MiB", act: read },
    Work { name: "read 4000 random pages", act: read_at_random },
    Work { name: "write 64 MiB", act: write },
    Work { name: "write 4000 random pages", act: write_at_random },
    Work { name: "create 1000 small files", act: create },
];

impl Work {
    /// The same start for every run: a tree, and a big file.
    pub fn prepare(&self, shared: &Path) -> Outcome<()> {
        let _ = fs::remove_dir_all(shared.join("made"));
        fs::create_dir(shared.join("made"))?;
        if shared.join("big").exists() {
            return Ok(());
        }
        for dir in 0..64 {
            let dir = shared.join(format!("tree/{dir}"));
            fs::create_dir_all(&dir)?;
            for file in 0..32 {
                fs::write(dir.join(format!("{file}")), "content")?;
            }
        }
        Ok(fs::write(shared.join("big"), vec![7; BIG * MIB])?)
    }

    pub fn time(&self, at: &Path) -> Outcome<Duration> {
        let start = Instant::now();
        (self.act)(at)?;
        Ok(start.elapsed())
    }
}

fn traverse(at: &Path) -> Outcome<()> {
    let (mut files, mut waiting) = (0, vec![at.join("tree")]);
    while let Some(dir) = waiting.pop() {
        for entry in fs::read_dir(dir)? {
            let entry = entry?;
            if entry.metadata()?.is_dir() { waiting.push(entry.path()) } else { files += 1 }
        }
    }
    if files == 2048 { Ok(()) } else { Err(format!("{files} files were found, of 2048").into()) }
}

fn read(at: &Path) -> Outcome<()> {
    let (mut file, mut buffer) = (File::open(at.join("big"))?, vec![0; MIB]);
    for _ in 0..BIG {
        file.read_exact(&mut buffer)?;
    }
    Ok(())
}

/// The same pages in every run, each one once.
fn pages() -> impl Iterator<Item = u64> {
    let all = (BIG * MIB / PAGE) as u64;
    (0..ACCESSES).map(move |at| at * 6_271 % all * PAGE as u64)
}

fn read_at_random(at: &Path) -> Outcome<()> {
    let (file, mut buffer) = (File::open(at.join("big"))?, [0; PAGE]);
    fadvise(&file, 0, None, Advice::Random)?;
    Ok(pages().try_for_each(|page| file.read_exact_at(&mut buffer, page))?)
}

fn write(at: &Path) -> Outcome<()> {
    let (mut file, buffer) = (File::create(at.join("made/file"))?, vec![9; MIB]);
    Ok((0..BIG).try_for_each(|_| file.write_all(&buffer))?)
}

fn write_at_random(at: &Path) -> Outcome<()> {
    let file = OpenOptions::new().write(true).open(at.join("big"))?;
    Ok(pages().try_for_each(|page| file.write_all_at(&[7; PAGE], page))?)
}

fn create(at: &Path) -> Outcome<()> {
    Ok((0..1000).try_for_each(|number| fs::write(at.join(format!("made/{number}")), [1; 1024]))?)
}
