//! virtio-fs against Debian's virtiofsd: the same directory, the same kernel as client, the same ring, in pairs.
//!
//! ```text
//!   work ─► this host's FUSE client ─► /dev/fuse ─► mount ─► ring in shared memory ─┬─► devices::Fs on its worker
//!                                                                                   └─► virtiofsd, by vhost-user
//! ```
//!
//! No VM takes part: a guest's exits cost the same whichever server answers, and in an emulated lab they would hide
//! everything else. What is compared is what differs: the way from the doorbell to the interrupt. Requests come one
//! at a time. Neither side has its jail or seccomp filter on; both may cache names and attributes for one second.
//!
//! Each kind of work runs in pairs, in turns of who is first, each with a fresh server and mount. Told is the median of the pairs'
//! ratios: above 1, Nacre took less time. `perf-files PAIRS COMMAND...`, where COMMAND starts virtiofsd.
#![forbid(unsafe_code)]

mod mount;
mod ring;
mod server;
mod work;

use std::error::Error;
use std::fs;
use std::path::Path;
use std::time::Duration;

use mount::Mounted;
use ring::Ring;
use server::{Ours, Theirs};
use work::Work;

type Outcome<T> = Result<T, Box<dyn Error>>;

/// One side of a pair, from its start to its end.
fn run(work: &Work, ours: bool, shared: &Path, command: &[String]) -> Outcome<Duration> {
    work.prepare(shared)?;
    let at = tempfile::tempdir()?;
    let ring = Ring::new()?;
    let took = if ours {
        let served = Ours::start(&ring, shared)?;
        let mounted = Mounted::new(ring, at.path())?;
        let took = work.time(&at.path().join("share"))?;
        drop(mounted);
        drop(served);
        took
    } else {
        let served = Theirs::start(&ring, shared, command)?;
        let mounted = Mounted::new(ring, at.path())?;
        let took = work.time(at.path())?;
        drop(mounted);
        drop(served);
        took
    };
    Ok(took)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn main() -> Outcome<()> {
    let mut words = std::env::args().skip(1);
    let pairs: usize = words.next().ok_or("usage: perf-files PAIRS VIRTIOFSD [ARGUMENT...]")?.parse()?;
    let command: Vec<String> = words.collect();
    virtiofs::clear_umask();
    // In memory: a disk would be the same for both, and slow.
    let shared = tempfile::tempdir_in("/dev/shm")?;
    println!("{:24} {:>10} {:>10} {:>7}  (of {pairs} pairs: lowest, highest)", "", "nacre", "virtiofsd", "ratio");
    for work in work::ALL {
        let (mut nacre, mut other, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
        // The first pair warms up.
        for pair in 0..=pairs {
            let mut took = [Duration::ZERO; 2];
            for ours in [pair % 2 == 0, pair % 2 != 0] {
                took[usize::from(ours)] = run(work, ours, shared.path(), &command)?;
            }
            let [theirs, ours] = took.map(|time| time.as_secs_f64() * 1e3);
            if pair > 0 {
                (nacre.push(ours), other.push(theirs), ratios.push(theirs / ours));
            }
        }
        let lowest = ratios.iter().copied().fold(f64::INFINITY, f64::min);
        let highest = ratios.iter().copied().fold(0.0, f64::max);
        let (nacre, other, ratio) = (median(nacre), median(other), median(ratios));
        println!("{:24} {nacre:7.1} ms {other:7.1} ms {ratio:7.2}  {lowest:.2} {highest:.2}", work.name);
        fs::remove_dir_all(shared.path())?;
        fs::create_dir(shared.path())?;
    }
    Ok(())
}
