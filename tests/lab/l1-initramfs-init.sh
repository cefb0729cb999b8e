#!/bin/sh
# The first program of the emulated KVM host: loads what the root needs, then hands over to lab-init.
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
while read -r module; do insmod "/modules/$module" || echo "LAB-ERROR cannot load $module"; done < /modules/order
mount -t ext4 /dev/vda /root || { echo "LAB-ERROR no root file system"; exec sh; }
cp /lab-init /root/lab-init
mkdir -p /root/host /root/images /root/scratch
mount --move /proc /root/proc
mount --move /sys /root/sys
mount --move /dev /root/dev
exec switch_root /root /lab-init
