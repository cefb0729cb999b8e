//! Compiles the seccomp policies, so that a thread is narrowed without parsing anything at run time.

use std::error::Error;
use std::path::Path;
use std::{env, fs};

use seccompiler::{TargetArch, compile_from_json};

fn main() -> Result<(), Box<dyn Error>> {
    let policies =
        Path::new(&env::var("CARGO_MANIFEST_DIR")?).join("../resources/seccomp/x86_64.json");
    println!("cargo::rerun-if-changed={}", policies.display());
    println!("cargo::rerun-if-changed=build.rs");
    let out = env::var("OUT_DIR")?;
    let programs = compile_from_json(fs::File::open(&policies)?, TargetArch::x86_64)
        .map_err(|error| format!("{}: {error}", policies.display()))?;
    for (role, program) in programs {
        let bytes: Vec<u8> = program
            .iter()
            .flat_map(|instruction| {
                let mut bytes = [0; 8];
                bytes[..2].copy_from_slice(&instruction.code.to_ne_bytes());
                bytes[2] = instruction.jt;
                bytes[3] = instruction.jf;
                bytes[4..].copy_from_slice(&instruction.k.to_ne_bytes());
                bytes
            })
            .collect();
        fs::write(Path::new(&out).join(format!("seccomp-{role}")), bytes)?;
    }
    Ok(())
}
