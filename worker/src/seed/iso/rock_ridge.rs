//! System use fields (SUSP 1.09, RRIP 1.09) of directory records.
//!
//! | entry | of | bytes | what |
//! |---|---|---|---|
//! | SP | root `.` | 7 | SUSP is in use |
//! | RR | all | 5 | which RRIP entries follow |
//! | PX | all | 36 | mode, links, owner |
//! | TF | all | 26 | creation, modification and access time |
//! | NM | files | 5 + name | the name as given |
//! | CE | root `.` | 28 | where the rest is: |
//! | ER | its continuation area | 237 | Rock Ridge is in use |

use super::spec::{RECORD_TIME, RRIP_DESCRIPTION, RRIP_ID, RRIP_SOURCE, both_u32};

/// Bits of RR (RRIP 1.09): PX, NM, TF.
const RR_PX: u8 = 1;
const RR_NM: u8 = 1 << 3;
const RR_TF: u8 = 1 << 7;
/// TF flags: creation, modification, access.
const TF_TIMES: u8 = 0b111;
const TIMES: usize = 3;

/// POSIX modes (RRIP 4.1.1): the seed holds secrets, so only its owner reads it.
const MODE_DIRECTORY: u32 = 0o040_500;
const MODE_FILE: u32 = 0o100_400;

fn entry(signature: &[u8; 2], data: &[u8]) -> Vec<u8> {
    let mut bytes = signature.to_vec();
    // Every entry of this module is shorter than 255: names are checked before.
    bytes.push(u8::try_from(4 + data.len()).unwrap_or(u8::MAX));
    bytes.push(1);
    bytes.extend_from_slice(data);
    bytes
}

fn posix(mode: u32, links: u32) -> Vec<u8> {
    let mut data = Vec::with_capacity(32);
    for number in [mode, links, 0, 0] {
        data.extend_from_slice(&both_u32(number));
    }
    entry(b"PX", &data)
}

fn times() -> Vec<u8> {
    let mut data = vec![TF_TIMES];
    for _ in 0..TIMES {
        data.extend_from_slice(&RECORD_TIME);
    }
    entry(b"TF", &data)
}

/// The fields of a file called `name`.
pub(super) fn file(name: &str) -> Vec<u8> {
    let mut bytes = entry(b"RR", &[RR_PX | RR_NM | RR_TF]);
    bytes.extend(posix(MODE_FILE, 1));
    bytes.extend(times());
    let mut data = vec![0];
    data.extend_from_slice(name.as_bytes());
    bytes.extend(entry(b"NM", &data));
    bytes
}

/// The fields of `..` in the root directory.
pub(super) fn parent() -> Vec<u8> {
    let mut bytes = entry(b"RR", &[RR_PX | RR_TF]);
    bytes.extend(posix(MODE_DIRECTORY, 2));
    bytes.extend(times());
    bytes
}

/// The fields of the root directory's own record, which point at the continuation area in `sector`.
pub(super) fn root(sector: u32) -> Vec<u8> {
    let mut bytes = entry(b"SP", &[0xbe, 0xef, 0]);
    bytes.extend(parent());
    let mut data = Vec::with_capacity(24);
    let length = u32::try_from(continuation().len()).unwrap_or(0);
    for number in [sector, 0, length] {
        data.extend_from_slice(&both_u32(number));
    }
    bytes.extend(entry(b"CE", &data));
    bytes
}

/// The continuation area of the root directory's own record.
pub(super) fn continuation() -> Vec<u8> {
    let lengths =
        [RRIP_ID, RRIP_DESCRIPTION, RRIP_SOURCE].map(|text| u8::try_from(text.len()).unwrap_or(0));
    let mut data = lengths.to_vec();
    data.push(1);
    for text in [RRIP_ID, RRIP_DESCRIPTION, RRIP_SOURCE] {
        data.extend_from_slice(text);
    }
    entry(b"ER", &data)
}
