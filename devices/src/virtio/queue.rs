//! A split virtqueue (virtio 1.2 §2.7) as the thread that serves it sees it.
//!
//! ```text
//!   pop() ──> chain ──> (device) ──> push(head, length) … push(head, length) ──> signal(): one interrupt a batch, or none
//! ```
//!
//! A queue whose rings cannot be right is *broken*: it yields nothing more and the driver is told to reset the device
//! (DEVICE_NEEDS_RESET, §2.1.2). Nothing else in the process notices.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use virtio_bindings::virtio_ring::{
    VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC, VRING_AVAIL_F_NO_INTERRUPT,
};
use virtio_queue::desc::split::Descriptor;
use virtio_queue::{DescriptorChain, Queue, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryError, GuestMemoryMmap};

use crate::GuestMemory;
use crate::seldom::Seldom;
use crate::virtio::VirtioInterrupt;
use crate::virtio::journal::{Journal, Tracking};

/// The features of the ring itself that every device here offers (§6).
pub const RING_FEATURES: u64 = 1 << VIRTIO_RING_F_INDIRECT_DESC | 1 << VIRTIO_RING_F_EVENT_IDX;

/// A descriptor chain over the guest's RAM.
pub type Chain<'m> = DescriptorChain<&'m GuestMemoryMmap<()>>;

/// Where `idx` lies in both rings (§2.7.6, §2.7.8), where their entries start, and the bytes of a used entry.
const IDX_OFFSET: u64 = 2;
const AVAIL_RING_OFFSET: u64 = 4;
const USED_RING_OFFSET: u64 = 4;
const USED_BYTES: u64 = 8;

/// How often queues were given up, in the whole process.
static BROKEN_QUEUES: Seldom = Seldom::new();

/// A descriptor chain that ends before its last descriptor: it loops, leaves its table, or names a table that is not RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a descriptor chain has no end")]
pub struct EndlessChain;

/// Calls `each` for the descriptors of a chain that hold anything, to the end of the chain or the first error.
///
/// # Errors
/// [`EndlessChain`], or what `each` returns.
pub fn walk<E: From<EndlessChain>>(
    chain: Chain<'_>,
    mut each: impl FnMut(&Descriptor) -> Result<(), E>,
) -> Result<(), E> {
    let mut more = true;
    for descriptor in chain {
        more = descriptor.has_next();
        if descriptor.len() != 0 {
            each(&descriptor)?;
        }
    }
    if more {
        Err(EndlessChain.into())
    } else {
        Ok(())
    }
}

/// An enabled queue, with all that serving it takes. Owned by one thread.
pub struct GuestQueue {
    index: u16,
    queue: Queue,
    memory: GuestMemory,
    interrupt: Arc<dyn VirtioInterrupt>,
    broken: bool,
    /// The used ring's index as the driver sees it.
    published: u16,
    /// What `published` was when the driver was last interrupted, or chose not to be.
    signalled: u16,
    journal: Option<Journal>,
    /// Chains that were under way when the last server of this queue ended; they come before all others.
    again: Option<Queue>,
}

impl GuestQueue {
    /// A queue to be served; `features` are those that were negotiated.
    #[must_use]
    pub fn new(
        index: u16,
        mut queue: Queue,
        features: u64,
        memory: GuestMemory,
        interrupt: Arc<dyn VirtioInterrupt>,
    ) -> Self {
        queue.set_event_idx(features & (1 << VIRTIO_RING_F_EVENT_IDX) != 0);
        let published = queue.next_used();
        let signalled = published;
        Self {
            index,
            queue,
            memory,
            interrupt,
            broken: false,
            published,
            signalled,
            journal: None,
            again: None,
        }
    }

    /// The same queue with a record of what is under way.
    #[must_use]
    pub fn tracked(mut self, tracking: Option<Tracking>) -> Self {
        if let Some(Tracking { journal, again }) = tracking {
            self.journal = Some(journal);
            self.again = again;
        }
        self
    }

    /// Its number as the driver knows it.
    #[must_use]
    pub fn index(&self) -> u16 {
        self.index
    }

    /// The queue as it stands: where it lies, and what was taken from it and answered.
    #[must_use]
    pub fn into_queue(self) -> Queue {
        self.queue
    }

    /// Its size in descriptors.
    #[must_use]
    pub fn size(&self) -> u16 {
        self.queue.size()
    }

    /// The guest's RAM.
    #[must_use]
    pub fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    /// Whether the queue yields nothing until it is reset.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        self.broken
    }

    /// Gives up on the queue: the driver broke a rule that leaves no way to answer it.
    pub fn give_up(&mut self, why: &dyn std::fmt::Display) {
        if !self.broken {
            self.broken = true;
            // A guest can do this as often as it likes.
            if let Some(times) = BROKEN_QUEUES.again() {
                tracing::warn!(
                    queue = self.index,
                    times,
                    "a virtqueue needs a reset: {why}"
                );
            }
            self.interrupt.needs_reset();
        }
    }

    /// The next chain that the driver made available and `memory`, which it lies in.
    pub fn pop<'m>(&mut self, memory: &'m GuestMemoryMmap<()>) -> Option<Chain<'m>> {
        if self.broken {
            return None;
        }
        if let Some(again) = &mut self.again {
            if let Ok(mut chains) = again.iter(memory)
                && let Some(chain) = chains.next()
            {
                return Some(chain);
            }
            self.again = None;
        }
        let chain = match self.queue.iter(memory) {
            Ok(mut available) => available.next()?,
            Err(error) => {
                self.give_up(&error);
                return None;
            }
        };
        if let Some(journal) = &mut self.journal
            && let Err(error) = journal.taken(chain.head_index())
        {
            self.give_up(&error);
            return None;
        }
        Some(chain)
    }

    /// Puts the chain popped last back, to be popped again.
    pub fn unpop(&mut self) {
        self.queue.go_to_previous_position();
    }

    /// Hands a chain back to the driver, with `length` bytes written to it. It sees none of the chains before [`Self::publish`].
    pub fn push(&mut self, head: u16, length: u32) {
        if self.broken {
            return;
        }
        let slot = self.queue.next_used() % self.queue.size().max(1);
        // `struct virtq_used_elem`: le32 id, le32 len.
        let element = u64::from(head) | u64::from(length) << 32;
        let address = self.queue.used_ring() + USED_RING_OFFSET + u64::from(slot) * USED_BYTES;
        match self
            .memory
            .write_obj(element.to_le(), GuestAddress(address))
        {
            Ok(()) => self
                .queue
                .set_next_used(self.queue.next_used().wrapping_add(1)),
            Err(error) => return self.give_up(&error),
        }
        if let Some(journal) = &mut self.journal
            && let Err(error) = journal.answered(head)
        {
            self.give_up(&error);
        }
    }

    /// Shows the driver all chains pushed so far, at once: a frame that takes several is never seen in part.
    pub fn publish(&mut self) {
        if self.broken || self.published == self.queue.next_used() {
            return;
        }
        self.published = self.queue.next_used();
        let index = GuestAddress(self.queue.used_ring() + IDX_OFFSET);
        if let Err(error) = self.memory.store(self.published, index, Ordering::Release) {
            return self.give_up(&error);
        }
        if let Some(journal) = &mut self.journal
            && let Err(error) = journal.published(self.published)
        {
            self.give_up(&error);
        }
    }

    /// Publishes, and interrupts the driver if it wants to know of anything published since the last call (§2.7.7).
    pub fn signal(&mut self) {
        self.publish();
        if self.broken || self.signalled == self.published {
            return;
        }
        // The driver states what it waits for and then looks at the index; here the order is the other way round.
        fence(Ordering::SeqCst);
        match self.wants_interrupt() {
            Ok(true) => self.interrupt.queue(self.index),
            Ok(false) => {}
            Err(error) => self.give_up(&error),
        }
        self.signalled = self.published;
    }

    /// With EVENT_IDX: whether `used_event` lies among the entries not yet signalled. Without: whether the driver did not ask for silence.
    fn wants_interrupt(&self) -> Result<bool, GuestMemoryError> {
        let ring = self.queue.avail_ring();
        if self.queue.event_idx_enabled() {
            let used_event = ring + AVAIL_RING_OFFSET + u64::from(self.queue.size()) * 2;
            let used_event: u16 = self
                .memory
                .load(GuestAddress(used_event), Ordering::Relaxed)?;
            let behind = self.published.wrapping_sub(used_event).wrapping_sub(1);
            Ok(behind < self.published.wrapping_sub(self.signalled))
        } else {
            let flags: u16 = self.memory.load(GuestAddress(ring), Ordering::Relaxed)?;
            Ok(u32::from(flags) & VRING_AVAIL_F_NO_INTERRUPT == 0)
        }
    }

    /// Tells the driver that the device's configuration changed.
    pub fn configuration_changed(&self) {
        self.interrupt.config();
    }

    /// Asks the driver not to ring while the queue is being served.
    pub fn silence(&mut self) {
        if let Err(error) = self.queue.disable_notification(&*self.memory) {
            self.give_up(&error);
        }
    }

    /// Asks the driver to ring again; true if chains came in meanwhile, which it will not ring for.
    pub fn listen(&mut self) -> bool {
        if self.broken {
            return false;
        }
        match self.queue.enable_notification(&*self.memory) {
            Ok(more) => more,
            Err(error) => {
                self.give_up(&error);
                false
            }
        }
    }
}
