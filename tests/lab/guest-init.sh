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
# The power button ends the guest, as on a distribution's system.
mkdir -p /etc/acpi/PWRF
printf '#!/bin/sh\necho LAB-POWER-BUTTON > /dev/console\nsync\npoweroff -f\n' > /etc/acpi/PWRF/00000080
chmod +x /etc/acpi/PWRF/00000080
acpid -l /tmp/acpid.log
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
