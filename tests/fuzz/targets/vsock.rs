//! Any guest behind the socket device: chains of any shape on its rings, packets of any kind in any order, while streams
//! of the host speak, listen and end. The driver needs the device's insides and lies beside them, in
//! `vmm/devices/src/vsock/fuzz.rs`.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| devices::hostile_socket_driver(bytes));
