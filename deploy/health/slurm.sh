#!/bin/bash
# Slurm's HealthCheckProgram: a short scan of this node's devices, and a drain of the node where one of them computes wrongly.
#
#     HealthCheckProgram=/etc/slurm/bitwitness-health.sh    HealthCheckInterval=3600    HealthCheckNodeState=IDLE
#
# Slurm only logs the exit code of a HealthCheckProgram and ends it after 60 seconds, so the node is drained from here. It does so in
# one case: `bitwitness scan` ended with 1 and its first line says `bitwitness scan fail`. Whatever is not judged, takes too long or
# cannot start is logged and drains nothing: one unreadable file must not drain a cluster. A node that is out already is left as it
# is, with the reason that is there, and no node is ever put back. The same script is a prolog for jobs that have nodes to themselves:
# it ends with 1 where a device failed, whereupon Slurm drains the node and requeues the job, else with 0.
#
# Settings, in /etc/bitwitness/slurm.env (lines NAME=value, owned by root) or in the environment:
#     BITWITNESS               the program                                      default: bitwitness
#     BITWITNESS_SCAN          options of `bitwitness scan`                     default: --minutes 0.3
#     BITWITNESS_SCANS         a folder of this node; failures are kept there   default: /var/lib/bitwitness/scans
#     BITWITNESS_SCAN_TIMEOUT  seconds, for the scan                            default: 45
set -uo pipefail
umask 027

settings=${BITWITNESS_SETTINGS:-/etc/bitwitness/slurm.env}
set -a  # also for the programs below: slurmd and monitors start this with little in the environment
# shellcheck source=/dev/null
[ -r "$settings" ] && . "$settings"
set +a
limit=${BITWITNESS_SCAN_TIMEOUT:-45}
scans=${BITWITNESS_SCANS:-/var/lib/bitwitness/scans}
node=${SLURMD_NODENAME:-$(hostname -s)}
read -r -a options <<<"${BITWITNESS_SCAN:---minutes 0.3}"

say() {  # into the log of the machine, and of slurmd where it keeps one
    echo "bitwitness health check on $node: $*" >&2
    command -v logger >/dev/null && timeout 2 logger -t bitwitness -p daemon.warning "health check on $node: $*" 2>/dev/null
    return 0
}

drain() {  # drain WORDS: take the node out, unless somebody has; 0 where it is out
    local shown state why=$*
    shown=$(timeout -k 2 5 scontrol -o show node "$node" 2>/dev/null) || return 1
    state=${shown#*State=}
    state=${state%% *}
    case $state in
        *DRAIN* | *DOWN* | *FAIL*)
            say "it is out already ($state), which is left as it is"
            return 0
            ;;
    esac
    timeout -k 2 5 scontrol update "NodeName=$node" State=DRAIN "Reason=${why:0:300}" >/dev/null 2>&1
}

[[ $node =~ ^[A-Za-z0-9_][A-Za-z0-9_.-]*$ ]] || { say "no name of a node: '$node'"; exit 0; }
if ! mkdir -p "$scans" || ! cd "$scans"; then
    say "$scans cannot be made, so nothing was scanned"
    exit 0
fi
exec 9>.lock
flock -n 9 || exit 0  # the last one still runs

if [ -s to-drain ]; then  # Slurm did not answer when a device had failed; a scan that passes now would not undo that
    if drain "$(head -n 1 to-drain)"; then rm -f to-drain; else say "Slurm does not answer: it is asked again next time"; fi
    exit 1
fi

work=$(mktemp -d running.XXXXXX) || { say "$scans cannot be written, so nothing was scanned"; exit 0; }
trap 'rm -rf "$scans/$work"' EXIT
said=$(timeout -k 2 "$limit" "${BITWITNESS:-bitwitness}" scan --exit-codes slurm --out "$scans/$work/scan" "${options[@]}" \
    2>"$work/errors" </dev/null 9>&-)
code=$?
first=$(printf '%s' "${said%%$'\n'*}" | tr -c '[:print:]' ' ')
case $code in
    0) exit 0 ;;
    124 | 137) say "not judged: the scan did not end within $limit s"; exit 0 ;;
esac
# A Python that cannot start ends with 1 as well, so the code alone is no verdict.
if [ "$code" -ne 1 ] || [[ $first != "bitwitness scan fail: "* ]]; then
    say "not judged: the scan ended with $code: ${first:-$(tail -n 1 "$work/errors" | tr -c '[:print:]' ' ')}"
    exit 0
fi

first="bitwitness scan: ${first#bitwitness scan fail: }"
say "$first"
kept=$(date -u +%Y%m%dT%H%M%SZ)-fail
mv "$work" "$kept" && say "what was found is kept in $scans/$kept"
printf '%s\n' "$first" >to-drain.new && mv -f to-drain.new to-drain
if drain "$first"; then rm -f to-drain; else say "Slurm does not answer: it is asked again next time"; fi
exit 1
