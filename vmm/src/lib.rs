//! The part of the VMM that is tested without a machine: its jail.
#![forbid(unsafe_code)]

pub mod jail;
