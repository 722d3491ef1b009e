#!/bin/bash
# Slurm's Epilog: what the hardware of this node said is kept beside the job, for when somebody asks later. In slurm.conf:
#
#     Epilog=/etc/slurm/epilog.d/50-bitwitness.sh
#
# It leaves BITWITNESS_SIGNALS_DIR/NODE/JOB.json, whole or not at all, and always ends with 0: Slurm drains a node whose epilog
# fails, and a log that could not be read is no reason for that.
#
# Settings, in /etc/bitwitness/slurm.env (lines NAME=value, owned by root) or in the environment:
#     BITWITNESS              the program                              default: bitwitness
#     BITWITNESS_SIGNALS_DIR  a folder on shared storage               needed; without it nothing is kept
#     BITWITNESS_TIMEOUT      seconds, for all of it                   default: 20
set -uo pipefail
umask 027

settings=${BITWITNESS_SETTINGS:-/etc/bitwitness/slurm.env}
# shellcheck source=/dev/null
[ -r "$settings" ] && . "$settings"
limit=${BITWITNESS_TIMEOUT:-20}
node=${SLURMD_NODENAME:-$(hostname -s)}
job=${SLURM_JOB_ID:-}

end() {  # end WORDS: say why nothing was kept
    echo "bitwitness epilog on $node: $*" >&2
    command -v logger >/dev/null && timeout 2 logger -t bitwitness -p daemon.warning "epilog on $node: $*" 2>/dev/null
    exit 0
}

[ -n "${BITWITNESS_SIGNALS_DIR:-}" ] || end "BITWITNESS_SIGNALS_DIR is not set, so nothing was kept"
[[ $job =~ ^[0-9]+$ ]] || end "no id of a job: '$job'"
[[ $node =~ ^[A-Za-z0-9_][A-Za-z0-9_.-]*$ ]] || end "no name of a node: '$node'"

# shellcheck disable=SC2317
keep() {  # runs under `timeout` as a whole: storage that hangs must not hold the node
    local folder=$BITWITNESS_SIGNALS_DIR/$node part
    mkdir -p "$folder" && part=$(mktemp "$folder/.$job.XXXXXX") || return 1
    if "${BITWITNESS:-bitwitness}" fleet signals --node "$node" --details --json >"$part" && [ -s "$part" ]; then
        chmod 640 "$part" && mv -f "$part" "$folder/$job.json"
    else
        rm -f "$part"
        return 1
    fi
}
export -f keep
export BITWITNESS BITWITNESS_SIGNALS_DIR node job
timeout -k 2 "$limit" bash -c keep </dev/null && exit 0
code=$?
# shellcheck disable=SC2016  # that shell has the variables
timeout 5 bash -c 'rm -f "$BITWITNESS_SIGNALS_DIR/$node/.$job."*' 2>/dev/null
end "the signals could not be kept (code $code; 124: not within $limit s)"
