#!/bin/sh
# For Slurm's Prolog: a job does not start on a node that is unfit for training.
#
#   Prolog=/usr/local/sbin/flopwatch-prolog.sh      (or call it from the prolog you have)
#
# When a prolog fails, Slurm drains the node and requeues the job, so it fails on "bad" and on nothing else: not on a
# degraded node, and not when the node cannot be judged. The reason goes to slurmd's log.
#
# Where the folder /run/flopwatch-jobs exists, it also writes the GPUs of the job, for `--job-mapping` of the exporter
# (docs/identity.md); flopwatch-epilog.sh clears that.

# slurmd sets no PATH. Without the export, `timeout` would search only /bin and /usr/bin.
export PATH="${PATH:-/usr/bin:/bin}:/usr/sbin:/sbin:/usr/local/bin"
mapping=${FLOPWATCH_JOB_MAPPING:-/run/flopwatch-jobs}

# FLOPWATCH_CHECK_FLAGS: as in flopwatch-healthcheck.sh.
# shellcheck disable=SC2086  # flags, one word each
output=$(timeout -k 5 20 "${FLOPWATCH:-flopwatch}" check --format nagios --deadline 5 ${FLOPWATCH_CHECK_FLAGS:-} 2>/dev/null)
status=$?

# Both, so that nothing but a verdict keeps a job from starting: a missing command or a wrong flag has a status, too.
if [ "$status" -eq 2 ]; then
    case $output in "BAD - "*)
        printf '%s\n' "$output" | head -n 1 >&2
        exit 1 ;;
    esac
fi

if [ -d "$mapping" ]; then
    for gpu in $(printf '%s' "${SLURM_JOB_GPUS:-}" | tr , ' '); do
        printf '%s\n' "${SLURM_JOB_ID:-}" >"$mapping/$gpu" || :
    done
fi
exit 0
