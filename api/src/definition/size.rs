//! Byte sizes as people write them.
