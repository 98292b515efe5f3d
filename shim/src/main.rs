//! `containerd-shim-nacre-v2`: one binary, four uses.
//!
//! * `start`: bind a socket, leave a server behind, print its address. Only the address may reach the outputs:
//!   containerd reads both together. On failure the error goes to stderr and the exit code is 1.
//! * `delete`: clean up what a pod may have left; print a `DeleteResponse`.
//! * `-v`, `-info`: say who we are.
//! * no action: the server itself, which `start` spawned with the listening socket as its standard input.
#![forbid(unsafe_code)]

use std::{
    env,
    io::{self, Write},
    process::ExitCode,
};

use shim::{bootstrap, cleanup, flags::Flags, info, server};

fn main() -> ExitCode {
    let flags = Flags::parse(env::args_os().skip(1).map(|arg| arg.to_string_lossy().into_owned()));
    let answer = if flags.version {
        Ok(info::version().into_bytes())
    } else if flags.info {
        Ok(info::runtime_info())
    } else {
        match flags.action.as_str() {
            "start" => bootstrap::start(&flags).map(String::into_bytes).map_err(|error| error.to_string()),
            "delete" => Ok(cleanup::delete(&flags)),
            "" => return server::serve(&flags),
            other => Err(format!("unknown action {other:?}; containerd calls this program with start or delete")),
        }
    };
    // An output that is closed already leaves nobody to tell.
    match answer.and_then(|bytes| io::stdout().write_all(&bytes).map_err(|error| error.to_string())) {
        Ok(()) => ExitCode::SUCCESS,
        Err(text) => {
            let _ = io::stderr().write_all(text.as_bytes());
            ExitCode::FAILURE
        }
    }
}
