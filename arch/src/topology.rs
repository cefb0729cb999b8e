//! How a VM's processors are arranged, and the x2APIC id that follows for each.
//!
//! An id is the position in every level, each in a bit field wide enough for that level (Intel SDM 3A §9.9.1):
//!
//! ```text
//!   socket | die | core | thread        bits of a level = ceil(log2(count))
//! ```
//!
//! so ids have gaps where a count is no power of two. KVM takes a vCPU's creation id as its x2APIC id: create vCPU `index` with
//! id [`Topology::apic_id`]`(index)`.

/// Most processors of a VM.
pub const CPUS_MAX: u32 = 64;
/// Largest x2APIC id: what a message-signalled interrupt can address without extended destination ids (255 is broadcast).
pub const APIC_ID_MAX: u32 = 254;

/// Why an arrangement is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TopologyError {
    /// A level has no members.
    #[error("{level}: must be at least 1")]
    Empty {
        /// The level's name in the definition.
        level: &'static str,
    },
    /// Too many processors.
    #[error("{count} processors: at most {CPUS_MAX}")]
    TooMany {
        /// sockets x dies x cores x threads.
        count: u64,
    },
    /// The ids would not fit.
    #[error(
        "{sockets} x {dies} x {cores} x {threads} processors need an x2APIC id of {id}: at most {APIC_ID_MAX}"
    )]
    ApicId {
        /// Sockets.
        sockets: u32,
        /// Dies in a socket.
        dies: u32,
        /// Cores in a die.
        cores: u32,
        /// Threads of a core.
        threads: u32,
        /// The largest id.
        id: u32,
    },
}

/// A checked arrangement of 1 to 64 processors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Topology {
    sockets: u32,
    dies: u32,
    cores: u32,
    threads: u32,
}

/// Bits that number `count` things.
fn bits(count: u32) -> u32 {
    count.next_power_of_two().trailing_zeros()
}

impl Topology {
    /// `sockets` of `dies` of `cores` of `threads`.
    ///
    /// # Errors
    /// A level is empty, there are more than 64 processors, or an id would exceed 254.
    pub fn new(sockets: u32, dies: u32, cores: u32, threads: u32) -> Result<Self, TopologyError> {
        for (level, count) in [
            ("sockets", sockets),
            ("dies", dies),
            ("cores", cores),
            ("threads", threads),
        ] {
            if count == 0 {
                return Err(TopologyError::Empty { level });
            }
        }
        let count = [sockets, dies, cores, threads]
            .into_iter()
            .fold(1_u64, |product, level| {
                product.saturating_mul(u64::from(level))
            });
        if count > u64::from(CPUS_MAX) {
            return Err(TopologyError::TooMany { count });
        }
        let topology = Self {
            sockets,
            dies,
            cores,
            threads,
        };
        let id = topology.apic_id(topology.count() - 1);
        if id > APIC_ID_MAX {
            return Err(TopologyError::ApicId {
                sockets,
                dies,
                cores,
                threads,
                id,
            });
        }
        Ok(topology)
    }

    /// One socket of `count` single-threaded cores.
    ///
    /// # Errors
    /// `count` is not 1 to 64.
    pub fn flat(count: u32) -> Result<Self, TopologyError> {
        Self::new(1, 1, count, 1)
    }

    /// Processors.
    #[must_use]
    pub fn count(&self) -> u32 {
        self.sockets * self.threads_per_socket()
    }

    /// Sockets.
    #[must_use]
    pub fn sockets(&self) -> u32 {
        self.sockets
    }

    /// Dies in a socket.
    #[must_use]
    pub fn dies(&self) -> u32 {
        self.dies
    }

    /// Cores in a die.
    #[must_use]
    pub fn cores(&self) -> u32 {
        self.cores
    }

    /// Threads of a core.
    #[must_use]
    pub fn threads(&self) -> u32 {
        self.threads
    }

    /// Threads in a die.
    #[must_use]
    pub fn threads_per_die(&self) -> u32 {
        self.cores * self.threads
    }

    /// Threads in a socket.
    #[must_use]
    pub fn threads_per_socket(&self) -> u32 {
        self.dies * self.threads_per_die()
    }

    /// Low id bits that number the threads of a core.
    #[must_use]
    pub fn thread_bits(&self) -> u32 {
        bits(self.threads)
    }

    /// Low id bits that number the threads of a die.
    #[must_use]
    pub fn die_bits(&self) -> u32 {
        self.thread_bits() + bits(self.cores)
    }

    /// Low id bits that number the threads of a socket.
    #[must_use]
    pub fn socket_bits(&self) -> u32 {
        self.die_bits() + bits(self.dies)
    }

    /// The x2APIC id of processor `index` (0 up to [`Topology::count`] - 1): threads vary fastest.
    #[must_use]
    pub fn apic_id(&self, index: u32) -> u32 {
        let thread = index % self.threads;
        let core = index / self.threads % self.cores;
        let die = index / self.threads_per_die() % self.dies;
        let socket = index / self.threads_per_socket();
        thread | core << self.thread_bits() | die << self.die_bits() | socket << self.socket_bits()
    }

    /// The x2APIC ids of all processors, by index.
    pub fn apic_ids(&self) -> impl Iterator<Item = u32> + '_ {
        (0..self.count()).map(|index| self.apic_id(index))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn powers_of_two_leave_no_gaps_in_the_ids() {
        let topology = Topology::new(2, 2, 2, 2).unwrap();
        assert_eq!(
            topology.apic_ids().collect::<Vec<_>>(),
            (0..16).collect::<Vec<_>>()
        );
    }

    #[test]
    fn three_cores_take_two_bits() {
        let topology = Topology::new(2, 1, 3, 1).unwrap();
        assert_eq!(topology.apic_ids().collect::<Vec<_>>(), [0, 1, 2, 4, 5, 6]);
    }

    #[test]
    fn an_empty_level_is_named() {
        let error = Topology::new(1, 0, 4, 1).unwrap_err();
        assert_eq!(error.to_string(), "dies: must be at least 1");
    }

    #[test]
    fn sixty_five_processors_are_refused() {
        assert_eq!(
            Topology::flat(65),
            Err(TopologyError::TooMany { count: 65 })
        );
        assert_eq!(
            Topology::new(u32::MAX, u32::MAX, u32::MAX, 2),
            Err(TopologyError::TooMany { count: u64::MAX })
        );
    }

    #[test]
    fn every_arrangement_of_up_to_64_processors_has_addressable_ids() {
        for sockets in 1..=64 {
            for dies in 1..=64 / sockets {
                for cores in 1..=64 / sockets / dies {
                    for threads in 1..=64 / sockets / dies / cores {
                        Topology::new(sockets, dies, cores, threads).unwrap();
                    }
                }
            }
        }
    }

    proptest! {
        #[test]
        fn ids_ascend(sockets in 1_u32..5, dies in 1_u32..4, cores in 1_u32..5, threads in 1_u32..4) {
            if let Ok(topology) = Topology::new(sockets, dies, cores, threads) {
                let ids: Vec<_> = topology.apic_ids().collect();
                prop_assert!(ids.windows(2).all(|pair| pair[0] < pair[1]), "{ids:?}");
            }
        }
    }
}
