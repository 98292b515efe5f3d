//! Generates the messages and the ttrpc client and server of `agent.proto`; pure Rust, no protoc.

use std::{env, fs, path::Path};

use ttrpc_codegen::{Codegen, Customize};

fn main() {
    let out = env::var("OUT_DIR").expect("cargo sets OUT_DIR");
    println!("cargo:rerun-if-changed=proto/agent.proto");
    Codegen::new()
        .out_dir(&out)
        .inputs(["proto/agent.proto"])
        .include("proto")
        .rust_protobuf()
        .customize(Customize { async_all: true, ..Default::default() })
        .run()
        .expect("agent.proto compiles");
    for file in ["agent.rs", "agent_ttrpc.rs"] {
        drop_inner_attributes(&Path::new(&out).join(file));
    }
}

/// `include!` refuses inner attributes and inner docs, which the generators put at the top of a file.
fn drop_inner_attributes(path: &Path) {
    let text = fs::read_to_string(path).expect("generated file is readable");
    let kept: String = text
        .lines()
        .filter(|line| !line.starts_with("#![") && !line.starts_with("//!"))
        .map(|line| format!("{line}\n"))
        .collect();
    fs::write(path, kept).expect("generated file is writable");
}
