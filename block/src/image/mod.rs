//! Jobs on images.
