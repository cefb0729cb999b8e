//! placeholder while the crate is laid out
