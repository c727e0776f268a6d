#!/bin/sh
# For Slurm's Epilog: removes the GPU mapping that flopwatch-prolog.sh wrote.
#
#   Epilog=/usr/local/sbin/flopwatch-epilog.sh      (or call it from the epilog you have)
#
# It never fails, since a failed epilog drains the node.

mapping=${FLOPWATCH_JOB_MAPPING:-/run/flopwatch-jobs}
[ -d "$mapping" ] || exit 0
for gpu in $(printf '%s' "${SLURM_JOB_GPUS:-}" | tr , ' '); do
    : >"$mapping/$gpu" || :
done
exit 0
