//! Writes resources/openapi.json anew.

use std::error::Error;
use std::path::Path;

fn main() -> Result<(), Box<dyn Error>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../resources/openapi.json");
    std::fs::write(path, drover_api::server::openapi::generate()?)?;
    Ok(())
}
