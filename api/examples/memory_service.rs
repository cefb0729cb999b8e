//! Serves the API of a VM that exists in memory only, for tools that test HTTP interfaces: `memory_service SOCKET`.

use std::error::Error;
use std::future::pending;
use std::path::Path;
use std::sync::Arc;

use drover_api::server;

#[path = "../tests/memory/mod.rs"]
mod memory;

fn main() -> Result<(), Box<dyn Error>> {
    let socket = std::env::args_os()
        .nth(1)
        .ok_or("usage: memory_service SOCKET")?;
    let (listener, _guard) = server::bind_socket(Path::new(&socket))?;
    server::run(listener, Arc::new(memory::MemoryService::new()), pending())?;
    Ok(())
}
