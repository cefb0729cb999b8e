//! The timer against the host's clock. (A file of its own, as models of threads compile `timer` again.)

use rustix::event::{PollFd, PollFlags};

use super::timer::{Alarm, Timer, now};
use rustix::event::Timespec as Wait;

fn readable(timer: &Timer, patience_ms: i64) -> bool {
    let fd = timer.fd();
    let mut poll = [PollFd::new(&fd, PollFlags::IN)];
    let wait = Wait {
        tv_sec: patience_ms / 1000,
        tv_nsec: patience_ms % 1000 * 1_000_000,
    };
    rustix::event::poll(&mut poll, Some(&wait)).unwrap() == 1
}

#[test]
fn the_earliest_alarm_makes_it_readable_and_the_others_stay() {
    let timer = Timer::new().unwrap();
    let later = now() + 3_600 * 1_000_000_000;
    timer.set(Alarm::Job, Some(later));
    assert!(!readable(&timer, 0));
    assert!(!timer.clear_due());
    timer.set(Alarm::Limit, Some(now() + 2_000_000));
    assert!(readable(&timer, 5_000));
    assert!(timer.clear_due());
    assert!(!readable(&timer, 0));
    timer.set(Alarm::Job, Some(0));
    assert!(readable(&timer, 5_000));
    timer.set(Alarm::Job, None);
    assert!(!readable(&timer, 0));
}
