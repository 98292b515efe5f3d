//! The zero page (Documentation/arch/x86/zero-page.rst): command line, initramfs, memory map.

use linux_loader::{
    configurator::{BootConfigurator, BootParams, linux::LinuxBootConfigurator},
    loader::bootparam::{boot_e820_entry, boot_params},
};
use vm_memory::{Bytes, GuestAddress, GuestMemoryError};

use super::{CMDLINE, CMDLINE_MAX, HIGH_MEMORY, MP_TABLE, ZERO_PAGE};
use crate::{Memory, kernel::Loaded};

/// Type of usable RAM in the memory map.
const E820_RAM: u32 = 1;
/// "HdrS" and 0xaa55: marks of a filled-in setup header.
const HEADER_MAGIC: u32 = 0x5372_6448;
const BOOT_FLAG: u16 = 0xaa55;
/// A boot loader without a number of its own.
const LOADER_UNDEFINED: u8 = 0xff;

/// Why the boot tables could not be written.
#[derive(Debug, thiserror::Error)]
pub enum BootError {
    /// Longer than the kernel reads.
    #[error("the guest kernel command line has {0} bytes, {CMDLINE_MAX} are possible; shorten kernel_cmdline")]
    CmdlineTooLong(usize),
    /// A byte that would end it, or that no terminal shows.
    #[error("the guest kernel command line holds a byte that is not printable ASCII")]
    CmdlineBytes,
    /// The machine is too small for the tables.
    #[error("guest memory cannot hold the boot tables: {0}")]
    Memory(#[from] GuestMemoryError),
    /// The library refused the zero page.
    #[error("guest memory cannot hold the zero page: {0}")]
    ZeroPage(linux_loader::configurator::Error),
}

pub(super) fn write(memory: &Memory, loaded: &Loaded, cmdline: &str) -> Result<(), BootError> {
    write_cmdline(memory, cmdline)?;
    let mut params = boot_params::default();
    params.hdr.type_of_loader = LOADER_UNDEFINED;
    params.hdr.boot_flag = BOOT_FLAG;
    params.hdr.header = HEADER_MAGIC;
    params.hdr.cmd_line_ptr = CMDLINE as u32;
    params.hdr.cmdline_size = cmdline.len() as u32;
    // Both lie below 3 GiB: the initramfs is loaded into low memory.
    params.hdr.ramdisk_image = loaded.initramfs as u32;
    params.hdr.ramdisk_size = loaded.initramfs_size as u32;
    let map = memory_map(memory);
    params.e820_entries = map.len() as u8;
    params.e820_table[..map.len()].copy_from_slice(&map);
    LinuxBootConfigurator::write_bootparams(&BootParams::new(&params, GuestAddress(ZERO_PAGE)), memory.ram().as_ref())
        .map_err(BootError::ZeroPage)
}

fn write_cmdline(memory: &Memory, cmdline: &str) -> Result<(), BootError> {
    if cmdline.len() > CMDLINE_MAX {
        return Err(BootError::CmdlineTooLong(cmdline.len()));
    }
    if !cmdline.bytes().all(|byte| (b' '..=b'~').contains(&byte)) {
        return Err(BootError::CmdlineBytes);
    }
    // The memory is zero already, so the NUL at the end is there.
    memory.ram().write_slice(cmdline.as_bytes(), GuestAddress(CMDLINE))?;
    Ok(())
}

/// Usable RAM: below the MP table, from 1 MiB to the gap, and from 4 GiB.
fn memory_map(memory: &Memory) -> Vec<boot_e820_entry> {
    let layout = memory.layout();
    let usable = |addr, size| boot_e820_entry { addr, size, type_: E820_RAM };
    let mut map = vec![usable(0, MP_TABLE), usable(HIGH_MEMORY, layout.low - HIGH_MEMORY)];
    map.extend(layout.ranges().skip(1).map(|(start, length)| usable(start, length)));
    map
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_line_is_checked_before_it_is_written() {
        let memory = Memory::new(64).expect("memory");
        let long = "x".repeat(CMDLINE_MAX + 1);
        assert!(matches!(write_cmdline(&memory, &long), Err(BootError::CmdlineTooLong(_))));
        assert!(matches!(write_cmdline(&memory, "a\nb"), Err(BootError::CmdlineBytes)));
        write_cmdline(&memory, "quiet").expect("legal");
        let mut read = [0u8; 6];
        memory.ram().read_slice(&mut read, GuestAddress(CMDLINE)).expect("inside");
        assert_eq!(&read, b"quiet\0");
    }

    #[test]
    fn memory_map_leaves_out_the_tables_and_the_gap() {
        let memory = Memory::new(4096).expect("memory");
        let map: Vec<(u64, u64)> = memory_map(&memory).iter().map(|entry| (entry.addr, entry.size)).collect();
        assert_eq!(map, [(0, MP_TABLE), (HIGH_MEMORY, (3 << 30) - HIGH_MEMORY), (4 << 30, 1 << 30)]);
    }
}
