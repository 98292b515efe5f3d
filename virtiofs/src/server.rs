//! One FUSE message in, one reply out: what is served, what is refused, and why.
//!
//! Most requests are parsed by fuse-backend-rs and come to the methods in `passthrough`. It knows the protocol up to
//! SETUPMAPPING; what a newer kernel sends beyond that, and is worth serving, is taken out before and parsed here.
//!
//! Every opcode that Linux 6.12 has (`include/uapi/linux/fuse.h`, protocol 7.41), and its answer. "Guest" in the last
//! column means: its kernel does it by itself from then on and never asks again.
//!
//! | opcode | | answer | why |
//! |---|---|---|---|
//! | 1 LOOKUP, 3 GETATTR, 4 SETATTR, 5 READLINK, 17 STATFS | | served | |
//! | 2 FORGET, 42 BATCH_FORGET | | served | no reply, as the protocol says |
//! | 6 SYMLINK, 8 MKNOD, 9 MKDIR, 13 LINK, 35 CREATE | | served | |
//! | 10 UNLINK, 11 RMDIR, 12 RENAME, 45 RENAME2 | | served | all flags that the host's file system has |
//! | 14 OPEN, 15 READ, 16 WRITE, 18 RELEASE, 20 FSYNC | | served | |
//! | 43 FALLOCATE, 46 LSEEK | | served | |
//! | 21 SETXATTR, 22 GETXATTR, 23 LISTXATTR, 24 REMOVEXATTR | | served | |
//! | 26 INIT, 38 DESTROY | | served | a second INIT forgets what the first guest held |
//! | 27 OPENDIR, 28 READDIR, 44 READDIRPLUS, 29 RELEASEDIR, 30 FSYNCDIR | | served | |
//! | 36 INTERRUPT | | ignored | nothing here waits for anything that could be interrupted; no reply is due |
//! | 47 COPY_FILE_RANGE | here | served | no data through the guest, and a reflink where the host has one |
//! | 50 SYNCFS | here | served | the guest's `sync` and `syncfs` reach the host's disk |
//! | 51 TMPFILE | here | served | O_TMPFILE; LINK gives such a file its name |
//! | 25 FLUSH | | ENOSYS | at every close, for nothing: no written-back data, no shared locks. Guest |
//! | 31 GETLK, 32 SETLK, 33 SETLKW | | ENOSYS | never sent: locks are the guest's own, see the crate |
//! | 34 ACCESS | | ENOSYS | never sent: with `default_permissions` the guest's kernel checks modes. Guest |
//! | 37 BMAP | | ENOSYS | never sent: for file systems on a block device of the guest's |
//! | 39 IOCTL | | ENOTTY | chattr and the like: flags of the host's inodes are the host's. Devices are opened by the guest's kernel |
//! | 40 POLL | | ENOSYS | regular files are always ready. Guest |
//! | 41 NOTIFY_REPLY | | ENOSYS | never sent: this device has no notification queue |
//! | 48 SETUPMAPPING, 49 REMOVEMAPPING | | EINVAL | never sent: there is no DAX window |
//! | 52 STATX | | ENOSYS | only for the birth time, which an overlay invents (ADR-0008). Guest: GETATTR |
//! | any other | | ENOSYS | a kernel newer than this server takes it for one that does not know |
//!
//! Failure paths: a message without a whole header, or without room for a reply, is [`fuse_backend_rs::Error`], for
//! the device to say once; everything else is told to the guest as an error number.

use std::io::Write;
use std::sync::Arc;

use fuse_backend_rs::Error;
use fuse_backend_rs::abi::fuse_abi::{CopyFileRangeIn, CreateIn, EntryOut, InHeader, OpenOut, OutHeader, WriteOut};
use fuse_backend_rs::api::filesystem::Context;
use fuse_backend_rs::api::server;
use fuse_backend_rs::transport::{Reader, Writer};
use rustix::io::Errno;
use vm_memory::ByteValued;
use vm_memory::bitmap::BitmapSlice;

use crate::ShareTree;

const COPY_FILE_RANGE: u32 = 47;
const SYNCFS: u32 = 50;
const TMPFILE: u32 = 51;

/// Serves the requests of one device.
pub struct Server {
    tree: Arc<ShareTree>,
    known: server::Server<Arc<ShareTree>>,
}

impl Server {
    /// A server of what `tree` holds.
    pub fn new(tree: Arc<ShareTree>) -> Server {
        Server { known: server::Server::new(Arc::clone(&tree)), tree }
    }

    /// Serves one request; gives the length of the reply.
    pub fn handle_message<S: BitmapSlice>(&self, from: Reader<'_, S>, to: Writer<'_, S>) -> Result<usize, Error> {
        let mut body = from.clone();
        let header: InHeader = body.read_obj().map_err(Error::DecodeMessage)?;
        let answer = match header.opcode {
            COPY_FILE_RANGE => self.copy_file_range(&header, &mut body),
            SYNCFS => self.tree.sync_shares().map(|()| Vec::new()),
            TMPFILE => self.tmpfile(&header, &mut body),
            _ => return self.known.handle_message(from, to, None, None),
        };
        reply(&header, answer, to)
    }

    fn copy_file_range<S: BitmapSlice>(&self, header: &InHeader, body: &mut Reader<'_, S>) -> Result<Vec<u8>, Errno> {
        let args: CopyFileRangeIn = body.read_obj().map_err(|_| Errno::INVAL)?;
        let (from, to) = ((header.nodeid, args.fh_in, args.offset_in), (args.nodeid_out, args.fh_out, args.offset_out));
        if args.flags != 0 {
            return Err(Errno::INVAL);
        }
        let size = self.tree.copy_range(from, to, args.len)?;
        Ok(WriteOut { size, padding: 0 }.as_slice().to_vec())
    }

    fn tmpfile<S: BitmapSlice>(&self, header: &InHeader, body: &mut Reader<'_, S>) -> Result<Vec<u8>, Errno> {
        // A name follows, which the guest's kernel made up.
        let args: CreateIn = body.read_obj().map_err(|_| Errno::INVAL)?;
        let (entry, fh, options) = self.tree.create_nameless(&Context::from(header), header.nodeid, &args)?;
        let open = OpenOut { fh, open_flags: options.bits(), passthrough: 0 };
        Ok([EntryOut::from(entry).as_slice(), open.as_slice()].concat())
    }
}

fn reply<S: BitmapSlice>(
    header: &InHeader,
    answer: Result<Vec<u8>, Errno>,
    mut to: Writer<'_, S>,
) -> Result<usize, Error> {
    let (error, body) = match answer {
        Ok(body) => (0, body),
        Err(errno) => (-errno.raw_os_error(), Vec::new()),
    };
    let len = size_of::<OutHeader>() + body.len();
    let out = OutHeader { len: len as u32, error, unique: header.unique };
    to.write_all(&[out.as_slice(), &body].concat()).map_err(Error::FailedToWrite)?;
    Ok(len)
}
