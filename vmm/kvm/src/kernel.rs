//! Puts a kernel and its initramfs into guest memory.
//!
//! The kernel is an uncompressed x86_64 ELF (vmlinux) and is entered by the 64-bit boot protocol
//! (Documentation/arch/x86/boot.rst): no decompressor, no real mode. The initramfs lies at the end of low memory, page
//! aligned, where the kernel frees it after unpacking.
//!
//! Memory that no segment covers is zero, because it is new. Padding is not in the segments (vmm/guest-kernel/trim): a page
//! that nobody writes costs nothing. linux-loader's `Elf::load` is not used because it reads a segment through its mapping
//! without asking first whether the segment lies in one stretch of RAM.

use std::{
    fs::File,
    io::{self, Read},
    os::{fd::OwnedFd, unix::fs::FileExt},
};

use linux_loader::elf::{Elf64_Ehdr, Elf64_Phdr, PT_LOAD};
use vm_memory::ByteValued;

use crate::{Memory, MemoryError};

/// ELF class, byte order and machine that we boot (System V gABI, chapter 4): 64-bit, little-endian, x86_64.
const CLASS_AND_ORDER: [u8; 2] = [2, 1];
const EM_X86_64: u16 = 62;

/// Most program headers of a kernel. Linux has five, and a dozen without its padding.
const MAX_SEGMENTS: u16 = 64;

/// Lowest address at which a kernel may lie: below are the tables that it reads at boot.
const KERNEL_FLOOR: u64 = 1 << 20;

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
    /// Its table of segments makes no sense.
    #[error("the guest kernel's program headers are damaged; build it again")]
    BadSegments,
    /// A segment is cut off, or lies where there is no memory.
    #[error("the guest kernel's segment at {address:#x} cannot be loaded into {mib} MiB: {error}")]
    Segment {
        /// Its guest-physical address.
        address: u64,
        /// Memory of the machine below the gap.
        mib: u64,
        /// What went wrong.
        error: MemoryError,
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
    #[error("cannot read the initramfs: {0}")]
    Read(#[from] io::Error),
    /// The file cannot be copied.
    #[error("cannot load the initramfs: {0}")]
    Copy(#[from] MemoryError),
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

/// Returns the entry point and the end of the kernel in memory.
fn load_kernel(memory: &Memory, file: File) -> Result<(u64, u64), KernelError> {
    let header = read_header(&file)?;
    let mut end = 0;
    for segment in segments(&file, &header)? {
        let address = segment.p_paddr;
        let last = address.checked_add(segment.p_memsz).ok_or(KernelError::BadSegments)?;
        if address < KERNEL_FLOOR || segment.p_filesz > segment.p_memsz {
            return Err(KernelError::BadSegments);
        }
        memory.load(&file, segment.p_offset, address, segment.p_filesz).map_err(|error| KernelError::Segment {
            address,
            mib: memory.layout().low >> 20,
            error,
        })?;
        end = end.max(last);
    }
    Ok((header.e_entry, end))
}

fn read_header(mut file: &File) -> Result<Elf64_Ehdr, KernelError> {
    let mut header = Elf64_Ehdr::default();
    file.read_exact(header.as_mut_slice()).map_err(|_| KernelError::NotElf)?;
    if !header.e_ident.starts_with(b"\x7fELF") || header.e_ident[4..6] != CLASS_AND_ORDER {
        return Err(KernelError::NotElf);
    }
    if header.e_machine != EM_X86_64 {
        return Err(KernelError::WrongMachine(header.e_machine));
    }
    Ok(header)
}

/// The segments that are loaded, as the file states them.
fn segments(file: &File, header: &Elf64_Ehdr) -> Result<Vec<Elf64_Phdr>, KernelError> {
    let size = size_of::<Elf64_Phdr>();
    let well_formed = (1..=MAX_SEGMENTS).contains(&header.e_phnum) && usize::from(header.e_phentsize) == size;
    if !well_formed {
        return Err(KernelError::BadSegments);
    }
    let mut table = vec![Elf64_Phdr::default(); header.e_phnum.into()];
    for (index, segment) in (0..).zip(&mut table) {
        let offset = header.e_phoff.checked_add(index * size as u64).ok_or(KernelError::BadSegments)?;
        file.read_exact_at(segment.as_mut_slice(), offset).map_err(|_| KernelError::BadSegments)?;
    }
    table.retain(|segment| segment.p_type == PT_LOAD && segment.p_filesz > 0);
    if table.is_empty() { Err(KernelError::BadSegments) } else { Ok(table) }
}

fn load_initramfs(memory: &Memory, mut file: File, floor: u64, low: u64) -> Result<(u64, u64), KernelError> {
    let mut magic = [0u8; 6];
    file.read_exact(&mut magic).map_err(|_| KernelError::NotCpio)?;
    if &magic != b"070701" {
        return Err(KernelError::NotCpio);
    }
    let size = file.metadata()?.len();
    let max = low.saturating_sub(floor).min(INITRAMFS_MAX);
    if size > max {
        return Err(KernelError::InitramfsSize { size, max });
    }
    let address = (low - size) & !0xfff;
    memory.load(&file, 0, address, size)?;
    Ok((address, size))
}

#[cfg(test)]
mod tests {
    use std::io::{Seek, Write};

    use rustix::fs::{MemfdFlags, memfd_create};
    use vm_memory::{Bytes, GuestAddress};

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
        header[18..20].copy_from_slice(&machine.to_le_bytes());
        header
    }

    /// A kernel of one segment: `filesz` bytes of 0xab at `paddr`.
    fn kernel(paddr: u64, filesz: u64, memsz: u64) -> Vec<u8> {
        let mut image = elf_header(EM_X86_64);
        image[24..32].copy_from_slice(&paddr.to_le_bytes());
        image[32..40].copy_from_slice(&64u64.to_le_bytes());
        image[54..56].copy_from_slice(&56u16.to_le_bytes());
        image[56..58].copy_from_slice(&1u16.to_le_bytes());
        image.extend(1u32.to_le_bytes());
        image.extend([0; 4]);
        for field in [4096, paddr, paddr, filesz, memsz, 4096] {
            image.extend(field.to_le_bytes());
        }
        image.resize(4096, 0);
        image.resize(4096 + 8192, 0xab);
        image
    }

    #[test]
    fn segments_are_copied_to_their_addresses() {
        let memory = Memory::new(64).expect("memory");
        let loaded = load(&memory, image(&kernel(0x20_0000, 8192, 9000)), image(b"070701")).expect("loads");
        assert_eq!(loaded.entry, 0x20_0000);
        let byte = |address| memory.ram().read_obj::<u8>(GuestAddress(address)).expect("inside");
        assert_eq!([0x1f_ffff, 0x20_0000, 0x20_1fff, 0x20_2000].map(byte), [0, 0xab, 0xab, 0]);
    }

    #[test]
    fn segments_outside_of_memory_are_refused() {
        let memory = Memory::new(64).expect("memory");
        for (paddr, filesz, memsz) in [
            (64 << 20, 4096, 4096),
            ((64 << 20) - 4096, 8192, 8192),
            (u64::MAX - 100, 4096, 4096),
            (0x7000, 4096, 4096),
            (0x20_0000, 8192, 4096),
            (0x20_0000, 1 << 20, 1 << 20),
        ] {
            let result = load(&memory, image(&kernel(paddr, filesz, memsz)), image(b"070701"));
            assert!(result.is_err(), "{paddr:#x} {filesz} {memsz}");
        }
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
