//! The OpenAPI document (3.1). It is generated from the types and routes of this crate by `cargo run -p drover-api --features
//! server --example openapi`, checked in, and compared by a test; a running server sends the text that was checked in.

use utoipa::OpenApi;

/// The document as it is checked in.
pub const DOCUMENT: &str = include_str!("../../../resources/openapi.json");

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Drover",
        description = "One virtual machine, served on the unix socket of its process.",
        license(name = "Apache-2.0", identifier = "Apache-2.0"),
    ),
    paths(
        super::routes::info,
        super::routes::metrics,
        super::routes::events,
        super::routes::document,
        super::routes::create,
        super::routes::vm,
        super::routes::delete,
        super::routes::start,
        super::routes::shutdown,
        super::routes::reset,
        super::routes::pause,
        super::routes::resume,
        super::disk_routes::disks,
        super::disk_routes::resize,
        super::disk_routes::snapshot,
        super::disk_routes::limit,
        super::disk_routes::begin_job,
        super::disk_routes::jobs,
        super::disk_routes::job,
        super::disk_routes::change_job,
        super::disk_routes::delete_job,
    )
)]
struct Document;

/// The document as the code has it now, with a final line break.
///
/// # Errors
/// The document could not be written as JSON.
pub fn generate() -> serde_json::Result<String> {
    let mut text = Document::openapi().to_pretty_json()?;
    text.push('\n');
    Ok(text)
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_document_that_is_checked_in_is_the_one_of_the_code() {
        assert!(
            super::generate().unwrap() == super::DOCUMENT,
            "run: cargo run -p drover-api --features server --example openapi"
        );
    }
}
