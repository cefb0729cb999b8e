//! Disk images: raw files and qcow2 chains behind one engine a disk, and the jobs on them.
