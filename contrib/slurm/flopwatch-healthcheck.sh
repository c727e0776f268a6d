#!/bin/sh
# Slurm HealthCheckProgram: drains this node when it is unfit for training, with the reason.
#
#   HealthCheckProgram=/usr/local/sbin/flopwatch-healthcheck.sh
#   HealthCheckInterval=300
#   HealthCheckNodeState=ANY
#
# It drains on "bad" only: a degraded node works, and of an unknown one nothing is known. It does not change a node that
# is already drained or down, and never resumes one. An operator does that after the repair that the reason asks for
# (scontrol update nodename=NODE state=resume).
#
# An exporter behind TLS: set FLOPWATCH_CHECK_FLAGS below, for example
#   "--url https://localhost:9450/metrics --ca-file /etc/flopwatch/ca.crt --user slurm --password-file /etc/flopwatch/pw"
#
# Slurm kills a health check after 60 s; this one gives up before.

# slurmd sets no PATH. Without the export, `timeout` would search only /bin and /usr/bin.
export PATH="${PATH:-/usr/bin:/bin}:/usr/sbin:/sbin:/usr/local/bin"
FLOPWATCH=${FLOPWATCH:-flopwatch}
FLOPWATCH_CHECK_FLAGS=${FLOPWATCH_CHECK_FLAGS:-}
SCONTROL=${SCONTROL:-scontrol}
node=${SLURMD_NODENAME:-$(hostname -s)}

# Two looks: a link that is down for a moment is no reason to drain a node.
# shellcheck disable=SC2086  # flags, one word each
output=$(timeout -k 5 45 "$FLOPWATCH" check --format nagios --deadline 10 --seconds 5 $FLOPWATCH_CHECK_FLAGS 2>/dev/null)
status=$?
line=$(printf '%s\n' "$output" | head -n 1)

# Both, so that nothing but a verdict drains a node: a missing command or a wrong flag has a status, too.
[ "$status" -eq 2 ] || exit 0
case $line in "BAD - "*) ;; *) exit 0 ;; esac

state=$("$SCONTROL" show node -o "$node" 2>/dev/null | sed -n 's/.* State=\([^ ]*\).*/\1/p')
case $state in
    "") exit 0 ;;                      # no answer: the next check comes
    *DRAIN* | *DOWN* | *FAIL*) exit 0 ;;  # no job comes here, and the reason belongs to someone else
esac

reason=$(printf 'flopwatch: %s' "${line#BAD - }" | sed 's/ | .*//' | cut -c 1-200)
exec "$SCONTROL" update "nodename=$node" state=drain "reason=$reason"
