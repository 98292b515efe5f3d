//! Mounts directories through the server with this host's kernel as the guest, until standard input ends:
//! `cargo run -p virtiofs --example mount -- MOUNTPOINT name=DIRECTORY...` (as root).

#[path = "../tests/bridge/mod.rs"]
mod bridge;

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use virtiofs::{CachePolicy, Limits, ShareOptions, ShareTree};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    virtiofs::clear_umask();
    let tree = Arc::new(ShareTree::new(Limits::default()));
    let mut arguments = std::env::args().skip(1);
    let at = arguments.next().ok_or("usage: mount MOUNTPOINT name=DIRECTORY...")?;
    for share in arguments {
        let (name, directory) = share.split_once('=').ok_or("a share is name=DIRECTORY")?;
        let options = ShareOptions { read_only: false, cache: CachePolicy::private() };
        tree.attach_with(name, File::open(directory)?.into(), options)?;
    }
    let _mounted = bridge::Mounted::new(Arc::clone(&tree), Path::new(&at))?;
    std::io::stdin().read_to_end(&mut Vec::new())?;
    let (nodes, handles) = tree.in_use();
    println!("the guest held {nodes} files, {handles} of them open");
    Ok(())
}
