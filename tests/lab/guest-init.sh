#!/bin/busybox sh
# The first program of the small guest. It says that it runs, loads the drivers of the virtual devices
# and then takes commands from the console, one a line:
#
#     host:  ID COMMAND …        guest:  whatever the command prints
#                                        LAB-EXIT ID STATUS
/bin/busybox echo LAB-INIT
/bin/busybox --install -s /bin
export PATH=/bin HOME=/
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
mount -t tmpfs tmp /tmp
while read -r module; do insmod "/modules/$module" || echo "LAB-ERROR cannot load $module"; done < /modules/order
ip link set lo up
stty -echo -onlcr
echo "LAB-SHELL $(cut -d' ' -f1 /proc/uptime)"
while read -r id command; do
	[ -n "$id" ] || continue
	(eval "$command") < /dev/null 2>&1
	status=$?
	printf '\nLAB-EXIT %s %s\n' "$id" "$status"
done
echo "LAB-ERROR the console was closed"
poweroff -f
