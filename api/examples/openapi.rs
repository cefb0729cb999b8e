//! Writes resources/openapi.json.
fn main() {}
