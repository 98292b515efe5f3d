//! Process 1 of the guest. `main` is the boot list; read it top to bottom.
//!
//! The kernel's command line reaches us as arguments (words) and environment (`NAME=value`) for whatever the kernel
//! does not know itself: `NACRE_LOG=debug` (or info, warn, error) sets what is printed on the console; default warn.
#![forbid(unsafe_code)]

use std::{process::ExitCode, sync::Arc};

use agent_proto::CONTROL_PORT;
use guest_agent::{
    boot::{self, Error, step},
    container::{Containers, Places},
    link::Link,
    power,
    reap::Reaper,
    server,
};

fn main() -> ExitCode {
    power::exit_on_panic();
    console::log_to_it();
    match boot_and_serve() {
        Ok(()) => power::off(),
        Err(error) => {
            eprintln!("nacre-agent: {error}");
            ExitCode::FAILURE
        }
    }
}

fn boot_and_serve() -> Result<(), Error> {
    // A root that pivot_root can leave, and in it only what the agent itself uses.
    boot::new_root().map_err(step("build the real root"))?;
    boot::mount_proc().map_err(step("mount proc"))?;
    boot::mount_sys().map_err(step("mount sysfs"))?;
    boot::mount_cgroup().map_err(step("mount the cgroup tree"))?;
    boot::mount_shares().map_err(step("mount the shares"))?;
    boot::enter_new_root().map_err(step("enter the real root"))?;
    boot::loopback().map_err(step("bring lo up"))?;
    boot::raise_file_limit().map_err(step("raise the limit of open files"))?;
    // One thread for everything: see `guest_agent`.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(step("start the runtime"))?.block_on(serve())
}

async fn serve() -> Result<(), Error> {
    let reaper = Reaper::default();
    let children = Reaper::listen().map_err(step("listen for SIGCHLD"))?;
    tokio::spawn(reaper.clone().run(children));
    let link = Link::Vsock;
    // The host takes this connection as "ready": nothing may be missing from here on.
    let control = link.dial(CONTROL_PORT).await.map_err(step("connect to the host"))?;
    let places = Places { shares: boot::SHARES.into(), cgroup: boot::CGROUP.into(), link };
    let containers = Arc::new(Containers::new(places, reaper));
    server::serve(control.halves(), containers).await.map_err(step("serve the host"))
}

/// Log lines go to the console as they are.
mod console {
    use log::{LevelFilter, Log, Metadata, Record};

    struct Console;

    impl Log for Console {
        /// ttrpc reports the end of the connection, which is how every machine ends, as an error of its own.
        fn enabled(&self, metadata: &Metadata<'_>) -> bool {
            !metadata.target().starts_with("ttrpc")
        }

        fn log(&self, record: &Record<'_>) {
            if self.enabled(record.metadata()) {
                eprintln!("nacre-agent: {}: {}", record.level().as_str().to_lowercase(), record.args());
            }
        }

        fn flush(&self) {}
    }

    pub fn log_to_it() {
        let level = std::env::var("NACRE_LOG").ok().and_then(|level| level.parse().ok()).unwrap_or(LevelFilter::Warn);
        log::set_max_level(level);
        // Fails only if there is a logger already, and there is none.
        let _ = log::set_logger(&Console);
    }
}
