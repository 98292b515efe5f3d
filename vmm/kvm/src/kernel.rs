//! Puts a kernel and its initramfs into guest memory.
//!
//! The kernel is an uncompressed x86_64 ELF (vmlinux) and is entered by the 64-bit boot protocol
//! (Documentation/arch/x86/boot.rst): no decompressor, no real mode. The initramfs lies at the end of low memory, page
//! aligned, where the kernel frees it after unpacking.

use std::{
    fs::File,
    io::{self, Read, Seek, SeekFrom},
    os::fd::OwnedFd,
};

use linux_loader::loader::{Elf, KernelLoader};
use vm_memory::{Bytes, GuestAddress};

use crate::Memory;

/// Offset of `e_machine` in an ELF header, and the value for x86_64 (System V gABI, figure 4-3).
const E_MACHINE: usize = 18;
const EM_X86_64: u16 = 62;

/// Largest initramfs in bytes: it must leave room for the kernel in the smallest machine.
const INITRAMFS_MAX: u64 = 32 << 20;

/// Why the images cannot be booted.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// Too short, or no ELF at all.
    #[error("the guest kernel is not an ELF file; build it with vmm/guest-kernel/build (uncompressed vmlinux)")]
    NotElf,
    /// For another processor.
    #[error("the guest kernel is for ELF machine {0}, not for x86_64 (62)")]
    WrongMachine(u16),
    /// Damaged, or larger than the machine.
    #[error("the guest kernel cannot be loaded into {mib} MiB: {error}")]
    Load {
        /// Memory of the machine.
        mib: u64,
        /// The loader's words.
        error: linux_loader::loader::Error,
    },
    /// A kernel without 64-bit entry in RAM.
    #[error("the guest kernel's entry point {0:#x} is not in guest memory")]
    Entry(u64),
    /// The initramfs is empty, too large, or does not fit beside the kernel.
    #[error("the initramfs of {size} bytes does not fit: 1 to {max} bytes are possible")]
    InitramfsSize {
        /// Its size.
        size: u64,
        /// The largest that would fit.
        max: u64,
    },
    /// Not what the kernel can unpack.
    #[error("the initramfs is not an uncompressed newc cpio archive; build it with guest-agent/initramfs")]
    NotCpio,
    /// The file cannot be read.
    #[error("cannot read the {what}: {error}")]
    Read {
        /// Which image.
        what: &'static str,
        /// The kernel's answer.
        error: io::Error,
    },
}

/// Where the images are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Loaded {
    /// Guest-physical address of the kernel's first instruction.
    pub entry: u64,
    /// Guest-physical address of the initramfs.
    pub initramfs: u64,
    /// Its length in bytes.
    pub initramfs_size: u64,
}

/// Loads both images.
pub fn load(memory: &Memory, kernel: OwnedFd, initramfs: OwnedFd) -> Result<Loaded, KernelError> {
    let low = memory.layout().low;
    let (entry, kernel_end) = load_kernel(memory, File::from(kernel))?;
    if entry == 0 || entry >= low {
        return Err(KernelError::Entry(entry));
    }
    let (address, size) = load_initramfs(memory, File::from(initramfs), kernel_end, low)?;
    Ok(Loaded { entry, initramfs: address, initramfs_size: size })
}

fn load_kernel(memory: &Memory, mut file: File) -> Result<(u64, u64), KernelError> {
    let mut header = [0u8; 64];
    file.read_exact(&mut header).map_err(|_| KernelError::NotElf)?;
    if !header.starts_with(b"\x7fELF") {
        return Err(KernelError::NotElf);
    }
    let machine = u16::from_le_bytes([header[E_MACHINE], header[E_MACHINE + 1]]);
    if machine != EM_X86_64 {
        return Err(KernelError::WrongMachine(machine));
    }
    let loaded = Elf::load(memory.ram().as_ref(), None, &mut file, None)
        .map_err(|error| KernelError::Load { mib: memory.layout().low >> 20, error })?;
    Ok((loaded.kernel_load.0, loaded.kernel_end))
}

fn load_initramfs(memory: &Memory, mut file: File, floor: u64, low: u64) -> Result<(u64, u64), KernelError> {
    let read = |error| KernelError::Read { what: "initramfs", error };
    let mut magic = [0u8; 6];
    file.read_exact(&mut magic).map_err(|_| KernelError::NotCpio)?;
    if &magic != b"070701" {
        return Err(KernelError::NotCpio);
    }
    let size = file.seek(SeekFrom::End(0)).map_err(read)?;
    let max = low.saturating_sub(floor).min(INITRAMFS_MAX);
    if size > max {
        return Err(KernelError::InitramfsSize { size, max });
    }
    file.rewind().map_err(read)?;
    let address = (low - size) & !0xfff;
    memory
        .ram()
        .read_exact_volatile_from(GuestAddress(address), &mut file, size as usize)
        .map_err(|error| KernelError::Read { what: "initramfs", error: io::Error::other(error) })?;
    Ok((address, size))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use rustix::fs::{MemfdFlags, memfd_create};

    use super::*;

    fn image(bytes: &[u8]) -> OwnedFd {
        let mut file = File::from(memfd_create("image", MemfdFlags::CLOEXEC).expect("memfd"));
        file.write_all(bytes).expect("write");
        file.rewind().expect("rewind");
        file.into()
    }

    fn elf_header(machine: u16) -> Vec<u8> {
        let mut header = vec![0u8; 64];
        header[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
        header[E_MACHINE..E_MACHINE + 2].copy_from_slice(&machine.to_le_bytes());
        header
    }

    #[test]
    fn kernel_that_is_no_elf_is_named_as_such() {
        let memory = Memory::new(64).expect("memory");
        for bytes in [&b""[..], b"MZ", &[0u8; 4096]] {
            let error = load(&memory, image(bytes), image(b"070701")).expect_err("no ELF");
            assert!(matches!(error, KernelError::NotElf), "{error}");
        }
    }

    #[test]
    fn kernel_for_another_machine_is_refused() {
        let memory = Memory::new(64).expect("memory");
        let error = load(&memory, image(&elf_header(183)), image(b"070701")).expect_err("aarch64");
        assert!(matches!(error, KernelError::WrongMachine(183)), "{error}");
    }

    #[test]
    fn truncated_kernel_is_refused() {
        let memory = Memory::new(64).expect("memory");
        assert!(load(&memory, image(&elf_header(EM_X86_64)), image(b"070701")).is_err());
    }

    #[test]
    fn initramfs_must_be_newc_and_fit() {
        let memory = Memory::new(64).expect("memory");
        let low = memory.layout().low;
        let load = |bytes: &[u8], floor| load_initramfs(&memory, File::from(image(bytes)), floor, low);
        assert!(matches!(load(b"\x1f\x8b_gzip", 0), Err(KernelError::NotCpio)));
        assert!(matches!(load(b"070701xx", low - 4), Err(KernelError::InitramfsSize { size: 8, max: 4 })));
        assert_eq!(load(b"070701xx", 0).expect("fits"), (low - 4096, 8));
    }
}
