//! The file system device (virtio 1.2, 5.11): FUSE requests from the queues to a share tree and back.
//!
//! Two queues: one for requests that must not wait behind others (FORGET), one for all else; both are served by one
//! thread, in order. No DAX window yet. What one thread costs: a request that waits for the host's disk (fsync, syncfs,
//! a cold read) holds up those behind it. Each is otherwise a few microseconds, below what waking a second thread costs,
//! so a second request queue would pay for guests with several processors and slow disks, and only for them.
//!
//! Threats: a request is parsed by fuse-backend-rs and [`virtiofs::Server`], which check lengths against the
//! descriptors; the share tree checks names, node ids and handles. A chain that points outside of memory is answered
//! with nothing and logged once.

use std::sync::Arc;

use event_manager::{EventOps, Events, MutEventSubscriber};
use fuse_backend_rs::transport::{Reader, VirtioFsWriter};
use virtio::{Activation, Chain, Device, Memory, StartError, Virtqueue, Worker};
use virtio_bindings::virtio_ids::VIRTIO_ID_FS;
use virtiofs::{Server, ShareTree};

/// Bytes of the tag field in the configuration space.
const TAG_LENGTH: usize = 36;
const QUEUES: [u16; 2] = [128, 256];

/// The file system device.
pub struct Fs {
    tree: Arc<ShareTree>,
    config: Vec<u8>,
    worker: Worker,
}

impl Fs {
    /// Serves `tree` under `tag`, the name by which the guest mounts it, on `worker`.
    #[must_use]
    pub fn new(tag: &str, tree: Arc<ShareTree>, worker: Worker) -> Self {
        assert!(tag.len() < TAG_LENGTH, "the tag fits into its field");
        let mut config = vec![0; TAG_LENGTH];
        config[..tag.len()].copy_from_slice(tag.as_bytes());
        config.extend(1u32.to_le_bytes()); // request queues besides the first
        Self { tree, config, worker }
    }
}

impl Device for Fs {
    fn name(&self) -> &'static str {
        "fs"
    }

    fn id(&self) -> u32 {
        VIRTIO_ID_FS
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUES
    }

    fn config_space(&self) -> &[u8] {
        &self.config
    }

    fn start(&mut self, activation: Activation) -> Result<(), StartError> {
        let service =
            Service { server: Server::new(Arc::clone(&self.tree)), queues: activation.queues, complained: false };
        self.worker.start(Box::new(service))
    }

    fn stop(&mut self) {
        self.worker.stop();
        // The driver that comes next knows nothing of what this one looked up.
        self.tree.reset();
    }
}

struct Service {
    server: Server,
    queues: Vec<Virtqueue>,
    complained: bool,
}

impl MutEventSubscriber for Service {
    fn init(&mut self, ops: &mut EventOps<'_>) {
        for (index, queue) in (0..).zip(&self.queues) {
            queue.listen(ops, index);
        }
    }

    fn process(&mut self, events: Events, ops: &mut EventOps<'_>) {
        let Self { server, queues, complained } = self;
        let Some(queue) = queues.get_mut(events.data() as usize) else { return };
        queue.serve(ops, |memory, chain| {
            serve(server, memory, chain).unwrap_or_else(|error| {
                if !*complained {
                    log::warn!("virtio-fs: a request cannot be served: {error} (said once)");
                    *complained = true;
                }
                0
            })
        });
    }
}

/// Serves one request; returns the length of the reply.
fn serve(server: &Server, memory: &Memory, chain: Chain) -> Result<u32, String> {
    let reader = Reader::from_descriptor_chain(memory, chain.clone()).map_err(|error| error.to_string())?;
    let writer = VirtioFsWriter::new(memory, chain).map_err(|error| error.to_string())?;
    let written = server.handle_message(reader, writer.into()).map_err(|error| error.to_string())?;
    Ok(written as u32)
}
