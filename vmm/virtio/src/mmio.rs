//! The register window of virtio over MMIO (virtio 1.2, 4.2.2), the one transport of our machines.

use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering},
};

use virtio_bindings::{
    virtio_config::{
        VIRTIO_CONFIG_S_ACKNOWLEDGE, VIRTIO_CONFIG_S_DRIVER, VIRTIO_CONFIG_S_DRIVER_OK, VIRTIO_CONFIG_S_FAILED,
        VIRTIO_CONFIG_S_FEATURES_OK, VIRTIO_CONFIG_S_NEEDS_RESET, VIRTIO_F_VERSION_1,
    },
    virtio_mmio::*,
    virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC},
};
use virtio_queue::{Queue, QueueT};
use vmm_sys_util::eventfd::EventFd;

use crate::{Activation, Device, Interrupt, Memory, Virtqueue, queue::idle};

/// Bytes of the window.
pub const WINDOW: u64 = 0x1000;

/// Where in the window the guest rings; the value is the queue's index.
pub const DOORBELL_OFFSET: u64 = VIRTIO_MMIO_QUEUE_NOTIFY as u64;

const MAGIC: u32 = u32::from_le_bytes(*b"virt");
const VERSION: u32 = 2;
/// "NACR": nobody looks, but it must not be zero.
const VENDOR: u32 = u32::from_le_bytes(*b"NACR");

const RING_FEATURES: u64 = 1 << VIRTIO_F_VERSION_1 | 1 << VIRTIO_RING_F_EVENT_IDX | 1 << VIRTIO_RING_F_INDIRECT_DESC;

/// The statuses a driver may write, each with the ones that it may follow.
const STEPS: [(u32, u32); 4] = [
    (VIRTIO_CONFIG_S_ACKNOWLEDGE, 0),
    (VIRTIO_CONFIG_S_ACKNOWLEDGE | VIRTIO_CONFIG_S_DRIVER, VIRTIO_CONFIG_S_ACKNOWLEDGE),
    (CONFIGURED, VIRTIO_CONFIG_S_ACKNOWLEDGE | VIRTIO_CONFIG_S_DRIVER),
    (CONFIGURED | VIRTIO_CONFIG_S_DRIVER_OK, CONFIGURED),
];
const CONFIGURED: u32 = VIRTIO_CONFIG_S_ACKNOWLEDGE | VIRTIO_CONFIG_S_DRIVER | VIRTIO_CONFIG_S_FEATURES_OK;

/// The line into the guest, with the register in which the guest reads why it was raised.
struct Line {
    raise: Box<dyn Fn() + Send + Sync>,
    reasons: AtomicU32,
}

impl Line {
    /// Raises the line unless the guest has not yet taken the same reason: a driver acknowledges before it looks at the
    /// rings, so it will see what is new, and a level-triggered line would not rise again either.
    fn raise_for(&self, reason: u32) {
        if self.reasons.fetch_or(reason, Ordering::SeqCst) & reason == 0 {
            (self.raise)();
        }
    }
}

impl Interrupt for Line {
    fn queue(&self) {
        self.raise_for(VIRTIO_MMIO_INT_VRING);
    }

    fn config(&self) {
        self.raise_for(VIRTIO_MMIO_INT_CONFIG);
    }
}

/// The registers of one device.
pub struct MmioTransport {
    device: Box<dyn Device>,
    memory: Arc<Memory>,
    line: Arc<Line>,
    doorbells: Vec<EventFd>,
    queues: Vec<Queue>,
    status: u32,
    device_features_page: u32,
    driver_features_page: u32,
    driver_features: u64,
    selected: usize,
}

impl MmioTransport {
    /// Puts `device` behind registers. `raise` raises its interrupt line; `doorbells` has one event for each queue.
    pub fn new(
        device: Box<dyn Device>,
        memory: Arc<Memory>,
        raise: impl Fn() + Send + Sync + 'static,
        doorbells: Vec<EventFd>,
    ) -> Self {
        assert_eq!(doorbells.len(), device.queue_sizes().len(), "one doorbell for each queue of {}", device.name());
        let queues = device.queue_sizes().iter().map(|size| idle(*size)).collect();
        let line = Arc::new(Line { raise: Box::new(raise), reasons: AtomicU32::new(0) });
        Self {
            device,
            memory,
            line,
            doorbells,
            queues,
            status: 0,
            device_features_page: 0,
            driver_features_page: 0,
            driver_features: 0,
            selected: 0,
        }
    }

    /// The guest reads `data.len()` bytes at `offset` in the window.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if offset >= u64::from(VIRTIO_MMIO_CONFIG) {
            self.read_config((offset - u64::from(VIRTIO_MMIO_CONFIG)) as usize, data);
        } else if let Ok(word) = <&mut [u8; 4]>::try_from(data) {
            // Registers are 32 bits wide; any other access reads zero.
            *word = self.register(offset as u32).to_le_bytes();
        }
    }

    /// The guest writes `data` at `offset` in the window. The configuration spaces of our devices are read-only.
    pub fn write(&mut self, offset: u64, data: &[u8]) {
        if let Ok(word) = <[u8; 4]>::try_from(data)
            && offset < u64::from(VIRTIO_MMIO_CONFIG)
        {
            self.set_register(offset as u32, u32::from_le_bytes(word));
        }
    }

    fn read_config(&self, offset: usize, data: &mut [u8]) {
        let space = self.device.config_space();
        let there = space.get(offset..).unwrap_or_default();
        for (byte, value) in data.iter_mut().zip(there) {
            *byte = *value;
        }
    }

    fn register(&self, offset: u32) -> u32 {
        match offset {
            VIRTIO_MMIO_MAGIC_VALUE => MAGIC,
            VIRTIO_MMIO_VERSION => VERSION,
            VIRTIO_MMIO_DEVICE_ID => self.device.id(),
            VIRTIO_MMIO_VENDOR_ID => VENDOR,
            VIRTIO_MMIO_DEVICE_FEATURES => page_of(self.offered_features(), self.device_features_page),
            VIRTIO_MMIO_QUEUE_NUM_MAX => self.queues.get(self.selected).map_or(0, |queue| queue.max_size().into()),
            VIRTIO_MMIO_QUEUE_READY => self.queues.get(self.selected).map_or(0, |queue| queue.ready().into()),
            VIRTIO_MMIO_INTERRUPT_STATUS => self.line.reasons.load(Ordering::SeqCst),
            VIRTIO_MMIO_STATUS => self.status,
            // No shared memory regions: length and base of every one are all ones (4.2.2).
            VIRTIO_MMIO_SHM_LEN_LOW..=VIRTIO_MMIO_SHM_BASE_HIGH => u32::MAX,
            _ => 0,
        }
    }

    fn set_register(&mut self, offset: u32, value: u32) {
        match offset {
            VIRTIO_MMIO_DEVICE_FEATURES_SEL => self.device_features_page = value,
            VIRTIO_MMIO_DRIVER_FEATURES_SEL => self.driver_features_page = value,
            VIRTIO_MMIO_DRIVER_FEATURES => self.accept_features(value),
            VIRTIO_MMIO_QUEUE_SEL => self.selected = value as usize,
            VIRTIO_MMIO_INTERRUPT_ACK => {
                self.line.reasons.fetch_and(!value, Ordering::SeqCst);
            }
            VIRTIO_MMIO_STATUS => self.set_status(value),
            _ => self.configure_queue(offset, value),
        }
    }

    fn offered_features(&self) -> u64 {
        self.device.features() | RING_FEATURES
    }

    fn accept_features(&mut self, value: u32) {
        if self.status & VIRTIO_CONFIG_S_FEATURES_OK != 0 || self.driver_features_page > 1 {
            return;
        }
        let shift = 32 * self.driver_features_page;
        let page = self.offered_features() & (u64::from(u32::MAX) << shift);
        self.driver_features =
            (self.driver_features & !(u64::from(u32::MAX) << shift)) | (u64::from(value) << shift) & page;
    }

    /// Queues are laid out between FEATURES_OK and DRIVER_OK, and never while they run.
    fn configure_queue(&mut self, offset: u32, value: u32) {
        if self.status != CONFIGURED {
            return;
        }
        let Some(queue) = self.queues.get_mut(self.selected) else { return };
        match offset {
            VIRTIO_MMIO_QUEUE_NUM => queue.set_size(u16::try_from(value).unwrap_or(0)),
            VIRTIO_MMIO_QUEUE_READY => queue.set_ready(value == 1),
            VIRTIO_MMIO_QUEUE_DESC_LOW => queue.set_desc_table_address(Some(value), None),
            VIRTIO_MMIO_QUEUE_DESC_HIGH => queue.set_desc_table_address(None, Some(value)),
            VIRTIO_MMIO_QUEUE_AVAIL_LOW => queue.set_avail_ring_address(Some(value), None),
            VIRTIO_MMIO_QUEUE_AVAIL_HIGH => queue.set_avail_ring_address(None, Some(value)),
            VIRTIO_MMIO_QUEUE_USED_LOW => queue.set_used_ring_address(Some(value), None),
            VIRTIO_MMIO_QUEUE_USED_HIGH => queue.set_used_ring_address(None, Some(value)),
            _ => {}
        }
    }

    fn set_status(&mut self, value: u32) {
        if value == 0 {
            return self.reset();
        }
        if value & VIRTIO_CONFIG_S_FAILED != 0 {
            self.status |= VIRTIO_CONFIG_S_FAILED;
            return;
        }
        if !STEPS.contains(&(value, self.status)) {
            log::debug!("virtio-{}: driver went from status {:#x} to {value:#x}", self.device.name(), self.status);
            return;
        }
        self.status = value;
        if value & VIRTIO_CONFIG_S_DRIVER_OK != 0 {
            self.start();
        }
    }

    fn start(&mut self) {
        if let Err(reason) = self.try_start() {
            log::warn!("virtio-{}: {reason}; the driver must reset the device", self.device.name());
            self.status |= VIRTIO_CONFIG_S_NEEDS_RESET;
            self.line.config();
        }
    }

    fn try_start(&mut self) -> Result<(), String> {
        let event_idx = self.driver_features & (1 << VIRTIO_RING_F_EVENT_IDX) != 0;
        let mut queues = Vec::with_capacity(self.queues.len());
        for (index, (queue, doorbell)) in self.queues.iter_mut().zip(&self.doorbells).enumerate() {
            if !queue.is_valid(self.memory.as_ref()) {
                return Err(format!("queue {index} does not lie in guest memory"));
            }
            queue.set_event_idx(event_idx);
            let running = std::mem::replace(queue, idle(queue.max_size()));
            let doorbell = doorbell.try_clone().map_err(|error| error.to_string())?;
            let interrupt = Arc::clone(&self.line) as Arc<dyn Interrupt>;
            queues.push(Virtqueue::new(self.device.name(), running, Arc::clone(&self.memory), doorbell, interrupt));
        }
        let activation = Activation { memory: Arc::clone(&self.memory), queues, features: self.driver_features };
        self.device.start(activation).map_err(|error| error.to_string())
    }

    fn reset(&mut self) {
        if self.status & VIRTIO_CONFIG_S_DRIVER_OK != 0 {
            self.device.stop();
        }
        self.queues = self.device.queue_sizes().iter().map(|size| idle(*size)).collect();
        (self.status, self.driver_features, self.selected) = (0, 0, 0);
        (self.device_features_page, self.driver_features_page) = (0, 0);
        self.line.reasons.store(0, Ordering::SeqCst);
    }
}

/// The 32-bit page of a feature set; there are two.
fn page_of(features: u64, page: u32) -> u32 {
    match page {
        0 => features as u32,
        1 => (features >> 32) as u32,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use vm_memory::GuestAddress;
    use vmm_sys_util::eventfd::EFD_NONBLOCK;

    use super::*;
    use crate::StartError;

    struct Probe(Arc<AtomicUsize>);

    impl Device for Probe {
        fn name(&self) -> &'static str {
            "probe"
        }
        fn id(&self) -> u32 {
            4
        }
        fn queue_sizes(&self) -> &[u16] {
            &[16]
        }
        fn config_space(&self) -> &[u8] {
            b"abc"
        }
        fn start(&mut self, activation: Activation) -> Result<(), StartError> {
            assert_eq!(activation.queues.len(), 1);
            self.0.fetch_add(1, Ordering::SeqCst);
            Ok(())
        }
        fn stop(&mut self) {
            self.0.fetch_add(100, Ordering::SeqCst);
        }
    }

    fn probe() -> (MmioTransport, Arc<AtomicUsize>) {
        let memory = Arc::new(Memory::from_ranges(&[(GuestAddress(0), 0x10000)]).expect("memory"));
        let calls = Arc::new(AtomicUsize::new(0));
        let bell = EventFd::new(EFD_NONBLOCK).expect("eventfd");
        (MmioTransport::new(Box::new(Probe(Arc::clone(&calls))), memory, || {}, vec![bell]), calls)
    }

    fn get(transport: &MmioTransport, offset: u32) -> u32 {
        let mut word = [0; 4];
        transport.read(offset.into(), &mut word);
        u32::from_le_bytes(word)
    }

    fn set(transport: &mut MmioTransport, offset: u32, value: u32) {
        transport.write(offset.into(), &value.to_le_bytes());
    }

    fn configure(transport: &mut MmioTransport, table: u32) {
        for status in [1, 3, 11] {
            set(transport, VIRTIO_MMIO_STATUS, status);
        }
        set(transport, VIRTIO_MMIO_QUEUE_NUM, 8);
        set(transport, VIRTIO_MMIO_QUEUE_DESC_LOW, table);
        set(transport, VIRTIO_MMIO_QUEUE_AVAIL_LOW, table + 0x1000);
        set(transport, VIRTIO_MMIO_QUEUE_USED_LOW, table + 0x2000);
        set(transport, VIRTIO_MMIO_QUEUE_READY, 1);
        set(transport, VIRTIO_MMIO_STATUS, 15);
    }

    #[test]
    fn driver_that_follows_the_steps_starts_the_device_once() {
        let (mut transport, calls) = probe();
        assert_eq!(get(&transport, VIRTIO_MMIO_MAGIC_VALUE), 0x7472_6976);
        configure(&mut transport, 0x1000);
        set(&mut transport, VIRTIO_MMIO_STATUS, 15);
        assert_eq!((get(&transport, VIRTIO_MMIO_STATUS), calls.load(Ordering::SeqCst)), (15, 1));
        set(&mut transport, VIRTIO_MMIO_STATUS, 0);
        assert_eq!((get(&transport, VIRTIO_MMIO_STATUS), calls.load(Ordering::SeqCst)), (0, 101));
    }

    #[test]
    fn line_rises_once_for_each_reason_that_the_guest_has_taken() {
        let raised = Arc::new(AtomicU32::new(0));
        let count = Arc::clone(&raised);
        let raise = move || {
            count.fetch_add(1, Ordering::SeqCst);
        };
        let line = Line { raise: Box::new(raise), reasons: AtomicU32::new(0) };
        let after = |act: &dyn Fn()| {
            act();
            raised.load(Ordering::SeqCst)
        };
        assert_eq!((after(&|| line.queue()), after(&|| line.queue()), after(&|| line.config())), (1, 1, 2));
        line.reasons.fetch_and(!VIRTIO_MMIO_INT_VRING, Ordering::SeqCst);
        assert_eq!((after(&|| line.config()), after(&|| line.queue())), (2, 3));
    }

    #[test]
    fn skipped_steps_change_nothing() {
        let (mut transport, calls) = probe();
        for status in [15, 11, 3, 0x80 - 1] {
            set(&mut transport, VIRTIO_MMIO_STATUS, status);
            assert_eq!(get(&transport, VIRTIO_MMIO_STATUS), 0);
        }
        assert_eq!(calls.load(Ordering::SeqCst), 0);
    }

    #[test]
    fn queue_outside_of_memory_asks_for_a_reset() {
        let (mut transport, calls) = probe();
        configure(&mut transport, 0xf000_0000);
        assert_ne!(get(&transport, VIRTIO_MMIO_STATUS) & VIRTIO_CONFIG_S_NEEDS_RESET, 0);
        assert_eq!(calls.load(Ordering::SeqCst), 0);
    }

    #[test]
    fn features_that_were_not_offered_are_not_accepted() {
        let (mut transport, _) = probe();
        set(&mut transport, VIRTIO_MMIO_DRIVER_FEATURES, u32::MAX);
        set(&mut transport, VIRTIO_MMIO_DRIVER_FEATURES_SEL, 1);
        set(&mut transport, VIRTIO_MMIO_DRIVER_FEATURES, u32::MAX);
        assert_eq!(transport.driver_features, RING_FEATURES);
    }

    #[test]
    fn odd_accesses_read_zero_and_write_nothing() {
        let (mut transport, _) = probe();
        let mut wide = [0xff; 8];
        transport.read(0, &mut wide);
        assert_eq!(wide, [0; 8]);
        transport.write(VIRTIO_MMIO_STATUS.into(), &[1]);
        assert_eq!(get(&transport, VIRTIO_MMIO_STATUS), 0);
        let mut config = [0xff; 4];
        transport.read(0x101, &mut config);
        assert_eq!(&config, b"bc\0\0");
        transport.read(0xfff, &mut config);
        assert_eq!(config, [0; 4]);
    }
}
