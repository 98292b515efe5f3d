//! The two that are compared, each behind the same ring.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use devices::Fs;
use tempfile::TempDir;
use vhost::vhost_user::message::{VhostUserProtocolFeatures, VhostUserVirtioFeatures};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use virtio::{MmioTransport, Worker};
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_mmio::*;
use virtiofs::{Limits, ShareTree};

use super::Outcome;
use super::ring::{MEMORY, Ring, SIZE, parts};

const STARTED_WITHIN: Duration = Duration::from_secs(10);

/// Processor time that threads of a process have used, those that `wanted` picks by name.
fn processor_time(process: &str, wanted: impl Fn(&str) -> bool) -> Outcome<Duration> {
    let mut sum = 0;
    for task in std::fs::read_dir(format!("/proc/{process}/task"))? {
        let task = task?.path();
        if wanted(std::fs::read_to_string(task.join("comm"))?.trim()) {
            let figures = std::fs::read_to_string(task.join("schedstat"))?;
            sum += figures.split(' ').next().unwrap_or_default().parse::<u64>()?;
        }
    }
    Ok(Duration::from_nanos(sum))
}

/// Nacre's device on its worker, behind its registers.
pub struct Ours(MmioTransport);

impl Ours {
    pub fn start(ring: &Ring, shared: &Path) -> Outcome<Ours> {
        let tree = Arc::new(ShareTree::new(Limits::default()));
        tree.attach("share", OwnedFd::from(File::open(shared)?), false)?;
        let device = Box::new(Fs::new("bench", tree, Worker::new("fs", || {})?));
        let interrupt = ring.interrupt.try_clone()?;
        let raise = move || interrupt.write(1).unwrap_or_else(|error| eprintln!("no interrupt: {error}"));
        let doorbells = ring.doorbells.iter().map(|bell| bell.try_clone()).collect::<Result<_, _>>()?;
        let mut transport = MmioTransport::new(device, Arc::clone(&ring.memory), raise, doorbells);
        let mut set = |register: u32, value: u32| transport.write(register.into(), &value.to_le_bytes());
        set(VIRTIO_MMIO_STATUS, 1);
        set(VIRTIO_MMIO_STATUS, 3);
        set(VIRTIO_MMIO_DRIVER_FEATURES_SEL, 1);
        set(VIRTIO_MMIO_DRIVER_FEATURES, 1 << (VIRTIO_F_VERSION_1 - 32));
        set(VIRTIO_MMIO_STATUS, 11);
        for index in 0..2 {
            let [table, available, used] = parts(index.into()).map(|part| part as u32);
            set(VIRTIO_MMIO_QUEUE_SEL, index);
            set(VIRTIO_MMIO_QUEUE_NUM, SIZE.into());
            set(VIRTIO_MMIO_QUEUE_DESC_LOW, table);
            set(VIRTIO_MMIO_QUEUE_AVAIL_LOW, available);
            set(VIRTIO_MMIO_QUEUE_USED_LOW, used);
            set(VIRTIO_MMIO_QUEUE_READY, 1);
        }
        set(VIRTIO_MMIO_STATUS, 15);
        Ok(Ours(transport))
    }

    pub fn processor_time(&self) -> Outcome<Duration> {
        processor_time("self", |name| name == "fs")
    }
}

impl Drop for Ours {
    fn drop(&mut self) {
        self.0.write(VIRTIO_MMIO_STATUS.into(), &0u32.to_le_bytes());
    }
}

/// virtiofsd, a process of its own as always.
pub struct Theirs {
    process: Child,
    _frontend: Option<Frontend>,
    _folder: TempDir,
}

impl Theirs {
    pub fn start(ring: &Ring, shared: &Path, command: &[String]) -> Outcome<Theirs> {
        let folder = tempfile::tempdir()?;
        let socket = folder.path().join("socket");
        let (program, arguments) = command.split_first().ok_or("no virtiofsd was named")?;
        let process = Command::new(program)
            .args(arguments)
            .args(["--sandbox", "none", "--seccomp", "none", "--cache", "auto", "--log-level", "off"])
            .arg("--shared-dir")
            .arg(shared)
            .arg("--socket-path")
            .arg(&socket)
            .stderr(Stdio::null())
            .spawn()?;
        // From here on it is ended whatever fails.
        let mut theirs = Theirs { process, _frontend: None, _folder: folder };
        let deadline = Instant::now() + STARTED_WITHIN;
        while !socket.exists() {
            if Instant::now() > deadline {
                return Err("virtiofsd made no socket".into());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        theirs._frontend = Some(connect(&socket, ring)?);
        Ok(theirs)
    }

    pub fn processor_time(&self) -> Outcome<Duration> {
        processor_time(&self.process.id().to_string(), |_| true)
    }
}

impl Drop for Theirs {
    fn drop(&mut self) {
        self._frontend = None;
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn connect(socket: &Path, ring: &Ring) -> Outcome<Frontend> {
    let mut frontend = Frontend::connect(socket, 2)?;
    frontend.set_owner()?;
    let wanted = 1 << VIRTIO_F_VERSION_1 | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();
    frontend.set_features(frontend.get_features()? & wanted)?;
    let offered = frontend.get_protocol_features()?;
    frontend.set_protocol_features(offered & VhostUserProtocolFeatures::MQ)?;
    let base = ring.base()?;
    frontend.set_mem_table(&[VhostUserMemoryRegionInfo {
        guest_phys_addr: 0,
        memory_size: MEMORY as u64,
        userspace_addr: base,
        mmap_offset: 0,
        mmap_handle: ring.backing,
    }])?;
    for (index, doorbell) in ring.doorbells.iter().enumerate() {
        let [desc_table_addr, avail_ring_addr, used_ring_addr] = parts(index as u64).map(|part| base + part);
        frontend.set_vring_num(index, SIZE)?;
        frontend.set_vring_base(index, 0)?;
        let config = VringConfigData {
            queue_max_size: SIZE,
            queue_size: SIZE,
            flags: 0,
            desc_table_addr,
            used_ring_addr,
            avail_ring_addr,
            log_addr: None,
        };
        frontend.set_vring_addr(index, &config)?;
        frontend.set_vring_call(index, &ring.interrupt)?;
        frontend.set_vring_kick(index, doorbell)?;
        frontend.set_vring_enable(index, true)?;
    }
    // A question, since only its answer says that what was told before it is in force.
    frontend.get_features()?;
    Ok(frontend)
}
