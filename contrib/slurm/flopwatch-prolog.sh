#!/bin/sh
# For Slurm's Prolog: a job does not start on a node that is unfit for training.
#
#   Prolog=/usr/local/sbin/flopwatch-prolog.sh      (or call it from the prolog you have)
#
# When a prolog fails, Slurm drains the node and requeues the job, so it fails on "bad" and on nothing else: not on a
# degraded node, and not when the node cannot be judged. The reason goes to slurmd's log.

PATH=${PATH:-/usr/bin:/bin}:/usr/sbin:/sbin:/usr/local/bin

# FLOPWATCH_CHECK_FLAGS: as in flopwatch-healthcheck.sh.
# shellcheck disable=SC2086  # flags, one word each
output=$(timeout -k 5 20 "${FLOPWATCH:-flopwatch}" check --format nagios --deadline 5 ${FLOPWATCH_CHECK_FLAGS:-} 2>/dev/null)
status=$?

[ "$status" -eq 2 ] || exit 0
case $output in "BAD - "*) ;; *) exit 0 ;; esac
printf '%s\n' "$output" | head -n 1 >&2
exit 1
