#!/bin/bash
# Slurm's Prolog: a node that carries a device which was taken out for corruption takes no job. In slurm.conf:
#
#     Prolog=/etc/slurm/prolog.d/50-bitwitness.sh        PrologFlags=Alloc
#
# Where it ends with 1, Slurm drains this node and requeues the job, which then starts elsewhere. It does so in one case only:
# `bitwitness fleet admit` has named a condemned device. Anything else that goes wrong here, such as storage that does not
# answer, is logged and lets the job start: one unreadable file must not drain a cluster. BITWITNESS_STRICT=1 turns that round.
#
# Settings, in /etc/bitwitness/slurm.env (lines NAME=value, owned by root) or in the environment:
#     BITWITNESS            the program                                  default: bitwitness
#     BITWITNESS_CONDEMNED  condemned.json in the folder that the controller publishes to (fleet watch --publish DIR)
#                                                                        needed; without it every job is let start
#     BITWITNESS_TIMEOUT    seconds, for all of it                       default: 20
#     BITWITNESS_STRICT     1: refuse also where nothing can be said     default: 0
set -uo pipefail

settings=${BITWITNESS_SETTINGS:-/etc/bitwitness/slurm.env}
# shellcheck source=/dev/null
[ -r "$settings" ] && . "$settings"
limit=${BITWITNESS_TIMEOUT:-20}
node=${SLURMD_NODENAME:-$(hostname -s)}
strict=${BITWITNESS_STRICT:-0}

say() {  # into the log of the machine, and of slurmd where it keeps one
    echo "bitwitness prolog on $node: $*" >&2
    command -v logger >/dev/null && timeout 2 logger -t bitwitness -p daemon.warning "prolog on $node: $*" 2>/dev/null
    return 0
}

refuse() {  # refuse WORDS: with a reason that people and the controller know again; Slurm alone would say "Prolog error"
    local why=$*
    say "$why - no job starts here"
    timeout -k 2 5 scontrol update "NodeName=$node" State=DRAIN "Reason=bitwitness admit: ${why:0:300}" >/dev/null 2>&1
    exit 1
}

unsure() {
    [ "$strict" = 1 ] && refuse "$*"
    say "$* - the job starts"
    exit 0
}

[ -n "${BITWITNESS_CONDEMNED:-}" ] || unsure "BITWITNESS_CONDEMNED is not set, so nothing was checked"
timeout 5 test -e "$BITWITNESS_CONDEMNED" || unsure "$BITWITNESS_CONDEMNED is not there, so nothing was checked"

more=()
[ "$strict" = 1 ] && more=(--strict)
said=$(timeout -k 2 "$limit" "${BITWITNESS:-bitwitness}" fleet admit \
    --condemned "$BITWITNESS_CONDEMNED" --node "$node" --json "${more[@]}" 2>&1)
code=$?
said=$(printf '%s' "$said" | tr -s '[:cntrl:][:space:]' ' ')
case $code in
    0) exit 0 ;;
    124 | 137) unsure "the check did not end within $limit s" ;;
esac
# A Python that cannot start ends with 1 as well, so the code alone is no verdict.
if [ "$code" -eq 1 ] && [[ $said == *'"admitted": false'* ]]; then
    why=${said#*'"returned": ['}
    why=$(printf '%s' "${why%%']'*}" | tr -d '"')
    why=${why# }
    refuse "${why:-its devices cannot be told}"
fi
unsure "the check ended with $code: $said"
