#!/bin/bash
# PID 1 of the emulated KVM host: mounts, runs the job of the share, says how it ended, powers off.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
mkdir -p /dev/shm /dev/pts
ln -s /proc/self/fd /dev/fd
mount -t tmpfs tmp /tmp
mount -t tmpfs run /run
mount -t tmpfs shm /dev/shm
mount -t devpts devpts /dev/pts
mount -t cgroup2 cgroup /sys/fs/cgroup
mount -t debugfs debugfs /sys/kernel/debug
mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,cache=mmap host /host
mount -t ext4 -o ro /dev/vdb /images
mount -t ext4 /dev/vdc /scratch
ip link set lo up
# KVM's remarks about every guest's MSRs are no news; a panic still is.
dmesg -n 3
echo "LAB-UP $(cut -d' ' -f1 /proc/uptime)"
# A sign of life for whoever watches the console; a frozen host gives none.
while sleep 15; do echo LAB-TICK; done &
ticker=$!
/host/job
status=$?
kill "$ticker"
echo "LAB-JOB-EXIT=$status"
echo "LAB-DOWN $(cut -d' ' -f1 /proc/uptime)"
sync
# The disk goes away with the power: from here on only the shell's own loop may run.
echo o > /proc/sysrq-trigger
while :; do :; done
