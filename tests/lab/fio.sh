#!/bin/sh
# fio.sh SECONDS ROUNDS: rounds of fio in the guest, until SECONDS of its clock are over and there were ROUNDS.
#
# Four jobs write pieces of 4 to 64 KiB at random, eight at a time each, flush now and then, and read all of it again; each
# round writes other bytes at other places. Meanwhile files come and go, and what they leave is trimmed.
now() { cut -d. -f1 /proc/uptime; }
end=$(($(now) + $1))
while [ ! -e /tmp/over ]; do
	dd if=/dev/urandom of=/mnt/gone bs=64k count=32 conv=fsync 2> /tmp/dd.log && rm /mnt/gone && fstrim /mnt || exit 1
	echo >> /tmp/trims
done &
trim=$!
round=0
status=0
while [ $status = 0 ] && { [ $round -lt "$2" ] || [ "$(now)" -lt $end ]; }; do
	round=$((round + 1))
	echo "LAB-ROUND $round"
	/tools/bin/fio --thread --directory=/mnt --name=v --numjobs=4 --size=8m --rw=randwrite --bsrange=4k-64k --blockalign=4k \
		--ioengine=libaio --iodepth=8 --direct=1 --fsync=64 --fallocate=none --randseed=$round \
		--verify=crc32c --do_verify=1 --verify_fatal=1 --group_reporting --output=/tmp/fio.log || status=1
done
: > /tmp/over
wait $trim || status=2
cat /tmp/fio.log
echo "LAB-ROUND over"
echo "TRIMS $(wc -l < /tmp/trims)"
exit $status
