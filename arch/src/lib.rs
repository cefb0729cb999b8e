//! arch
