//! Whether what the shim executes is there.

use std::{fs, os::unix::fs::PermissionsExt, path::Path};

use config::Paths;

use super::Check;

/// VMM and holder.
pub fn checks(paths: &Paths) -> Vec<Check> {
    vec![check("vmm", "paths.vmm", &paths.vmm), check("holder", "paths.holder", &paths.holder)]
}

fn check(name: &'static str, key: &str, program: &Path) -> Check {
    let fix = || format!("install nacre (make install), or set {key} in its configuration");
    match fs::metadata(program) {
        Err(error) => Check::fail(name, format!("{}: {error}", program.display()), fix()),
        Ok(found) if !found.is_file() || found.permissions().mode() & 0o111 == 0 => {
            Check::fail(name, format!("{} is no executable file", program.display()), fix())
        }
        Ok(_) => Check::pass(name, program.display().to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn program_must_be_there_and_executable() {
        assert!(check("vmm", "paths.vmm", Path::new("/bin/sh")).is_good());
        for bad in ["/nonexistent/vmm", "/etc/passwd", "/"] {
            let check = check("vmm", "paths.vmm", Path::new(bad));
            assert!(check.detail.contains(bad) && check.fix.expect("fails").contains("paths.vmm"), "{bad}");
        }
    }
}
