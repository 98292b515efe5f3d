//! A peer on the control or event socket that was taken over: packets of any bytes with any number of descriptors.
//!
//! The first byte of an input is the number of descriptors, the rest is the packet. It is read as every type of message
//! there is; each is a message or a typed error at once, and a message survives being written and read again.
#![no_main]

use std::{
    fmt::Debug,
    io::IoSlice,
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use libfuzzer_sys::fuzz_target;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde::{Serialize, de::DeserializeOwned};
use vmm_api::{Channel, ChannelError, Event, MAX_FDS, Reply, Request};

/// Twice as many as a message may carry.
const MOST: usize = 2 * MAX_FDS;

fn send(to: &OwnedFd, packet: &[u8], descriptors: usize) {
    let all: [BorrowedFd<'_>; MOST] = [to.as_fd(); MOST];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if descriptors > 0 {
        assert!(control.push(SendAncillaryMessage::ScmRights(&all[..descriptors])), "there is room");
    }
    sendmsg(to, &[IoSlice::new(packet)], &mut control, SendFlags::empty()).expect("sent");
}

fn read<T: DeserializeOwned + Serialize + PartialEq + Debug>(packet: &[u8], descriptors: usize) {
    let (reader, writer) = Channel::pair().expect("socketpair");
    send(&writer, packet, descriptors);
    match reader.try_recv::<T>() {
        Ok(Some((message, received))) => {
            assert_eq!(received.len(), descriptors);
            let again = serde_json::to_vec(&message).expect("what was read can be written");
            assert_eq!(serde_json::from_slice::<T>(&again).expect("and read again"), message);
        }
        Err(ChannelError::Malformed(_)) => assert!(descriptors <= MAX_FDS),
        Err(ChannelError::Truncated) => assert!(descriptors > MAX_FDS),
        // An empty packet cannot be told from the end.
        Err(ChannelError::Closed) => assert!(packet.is_empty()),
        Ok(None) => panic!("the packet was swallowed"),
        Err(error) => panic!("unexpected: {error}"),
    }
}

fuzz_target!(|bytes: &[u8]| {
    let Some((first, packet)) = bytes.split_first() else { return };
    let descriptors = usize::from(*first) % (MOST + 1);
    read::<Request>(packet, descriptors);
    read::<Reply>(packet, descriptors);
    read::<Event>(packet, descriptors);
});
