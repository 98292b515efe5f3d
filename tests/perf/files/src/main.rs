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
//! Each kind of work runs in pairs, in turns of who is first, each with a fresh server and mount. Told are the medians
//! of both and of the pairs' ratios: above 1, Nacre took less. The server's processor time depends less on what else the machine
//! does. `perf-files PAIRS COMMAND...`, where COMMAND starts virtiofsd.
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

/// What a run took: on the clock, and of a processor for the server alone.
#[derive(Clone, Copy)]
struct Took {
    clock: f64,
    server: f64,
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// One side of a pair, from its start to its end.
fn run(work: &Work, ours: bool, shared: &Path, command: &[String]) -> Outcome<Took> {
    work.prepare(shared)?;
    let at = tempfile::tempdir()?;
    let ring = Ring::new()?;
    if ours {
        let served = Ours::start(&ring, shared)?;
        let _mounted = Mounted::new(ring, at.path())?;
        measure(|| work.time(&at.path().join("share")), || served.processor_time())
    } else {
        let served = Theirs::start(&ring, shared, command)?;
        let _mounted = Mounted::new(ring, at.path())?;
        measure(|| work.time(at.path()), || served.processor_time())
    }
}

fn measure(act: impl Fn() -> Outcome<Duration>, server: impl Fn() -> Outcome<Duration>) -> Outcome<Took> {
    let before = server()?;
    let clock = milliseconds(act()?);
    Ok(Took { clock, server: milliseconds(server()? - before) })
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
    println!("{pairs} pairs: medians in ms, and virtiofsd's by nacre's (lowest and highest)");
    println!("{:24} {:^39} {:^39}", "", "on the clock", "the server's processor time");
    for work in work::ALL {
        let (mut nacre, mut other) = (Vec::new(), Vec::new());
        // The first pair warms up.
        for pair in 0..=pairs {
            for ours in [pair % 2 == 0, pair % 2 != 0] {
                let took = run(work, ours, shared.path(), &command)?;
                if pair > 0 {
                    if ours { nacre.push(took) } else { other.push(took) }
                }
            }
        }
        let columns = [|took: &Took| took.clock, |took: &Took| took.server].map(|of| column(&nacre, &other, of));
        println!("{:24} {}", work.name, columns.join(" "));
        fs::remove_dir_all(shared.path())?;
        fs::create_dir(shared.path())?;
    }
    Ok(())
}

fn column(nacre: &[Took], other: &[Took], of: fn(&Took) -> f64) -> String {
    let ratios: Vec<f64> = nacre.iter().zip(other).map(|(ours, theirs)| of(theirs) / of(ours)).collect();
    let lowest = ratios.iter().copied().fold(f64::INFINITY, f64::min);
    let highest = ratios.iter().copied().fold(0.0, f64::max);
    let [nacre, other] = [nacre, other].map(|all| median(all.iter().map(of).collect()));
    format!("{nacre:8.1} {other:8.1} {:6.2} ({lowest:5.2} {highest:5.2})", median(ratios))
}
