//! A peer that was taken over: packets of any bytes, and messages that are almost right. Each is a message or a typed
//! error, and costs no more than its own packet.

use std::{
    io::IoSlice,
    mem::MaybeUninit,
    os::fd::{AsFd, OwnedFd},
};

use proptest::{collection::vec, prelude::*};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, send, sendmsg};
use vmm_api::{Channel, ChannelError, Event, MAX_FDS, Reply, Request};

/// Messages of each kind, to be damaged.
const MESSAGES: [&str; 6] = [
    r#"{"op":"boot","vcpus":1,"memory_mib":256,"cmdline":"quiet"}"#,
    r#"{"op":"attach_share","name":"r0","read_only":false}"#,
    r#"{"reply":"failed","failure":"no_kvm","message":"no"}"#,
    r#"{"event":"exited","reason":{"kind":"fault","message":"x"},"console":"y"}"#,
    r#"{"event":"connected","port":1024}"#,
    r#"{"event":"born"}"#,
];

/// Reads what was sent as every type there is; nothing may panic, and an answer comes at once.
fn read_as_everything(packet: &[u8]) {
    fn read<T: serde::de::DeserializeOwned>(packet: &[u8]) {
        let (reader, writer): (Channel, OwnedFd) = Channel::pair().expect("socketpair");
        send(&writer, packet, SendFlags::empty()).expect("sent");
        match reader.try_recv::<T>() {
            Ok(Some(_)) | Err(ChannelError::Malformed(_) | ChannelError::Truncated) => {}
            // An empty packet cannot be told from the end.
            Err(ChannelError::Closed) => assert!(packet.is_empty()),
            Ok(None) => panic!("the packet was swallowed"),
            Err(error) => panic!("unexpected: {error}"),
        }
    }
    read::<Request>(packet);
    read::<Reply>(packet);
    read::<Event>(packet);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn packet_of_any_bytes_is_a_message_or_a_typed_error(packet in vec(any::<u8>(), 0..300)) {
        read_as_everything(&packet);
    }

    #[test]
    fn damaged_message_is_a_message_or_a_typed_error(
        which in 0..MESSAGES.len(),
        at in 0..60usize,
        byte: u8,
        cut in 0..80usize,
    ) {
        let mut packet = MESSAGES[which].as_bytes().to_vec();
        if let Some(place) = packet.get_mut(at) {
            *place = byte;
        }
        packet.truncate(cut);
        read_as_everything(&packet);
    }
}

#[test]
fn more_descriptors_than_a_message_may_carry_are_refused() {
    for count in [MAX_FDS, MAX_FDS + 1, MAX_FDS + 2, 2 * MAX_FDS] {
        let (reader, writer) = Channel::pair().expect("socketpair");
        let descriptors = vec![writer.as_fd(); count];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2 * MAX_FDS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)), "there is room");
        let packet = [IoSlice::new(MESSAGES[5].as_bytes())];
        sendmsg(&writer, &packet, &mut control, SendFlags::empty()).expect("sent");
        match reader.try_recv::<Event>() {
            Ok(Some((Event::Born, received))) => assert_eq!((received.len(), count), (MAX_FDS, MAX_FDS)),
            Err(ChannelError::Truncated) => assert!(count > MAX_FDS),
            other => panic!("{count} descriptors: {other:?}"),
        }
    }
}

#[test]
fn deep_nesting_and_huge_numbers_are_refused() {
    read_as_everything("[".repeat(100_000).as_bytes());
    read_as_everything(br#"{"op":"boot","vcpus":99999999999999999999,"memory_mib":-1,"cmdline":""}"#);
}
