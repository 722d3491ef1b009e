#!/bin/bash
# A check for Nagios (also Icinga, Naemon, NRPE) and for node-problem-detector: a short scan of this node's devices.
#
#     monitor.sh nagios    0 OK, 2 CRITICAL, 3 UNKNOWN, and a line with performance data
#     monitor.sh npd       0 OK, 1 problem, 2 unknown, and at most 80 characters
#
# A failure stays until somebody removes the file `failed`: a device that computes wrongly once in a thousand times passes the next
# scan. While something else uses the devices nothing is scanned, and the last result is told, for a week at most. A scan that cannot
# start, takes too long or ends in a way that is not understood is unknown, never a failure and never OK.
#
# Settings, in /etc/bitwitness/monitor.env (lines NAME=value, owned by root) or in the environment:
#     BITWITNESS               the program                                        default: bitwitness
#     BITWITNESS_SCAN          options of `bitwitness scan`                       default: --minutes 0.3
#     BITWITNESS_STATE         a folder of this node                              default: /var/lib/bitwitness/monitor
#     BITWITNESS_SCAN_TIMEOUT  seconds, for the scan                              default: 50
#     BITWITNESS_IDLE          a command; where it ends with 0 the devices are free
#                              default: nvidia-smi shows no program on them; without nvidia-smi they are taken to be free
#     BITWITNESS_HOURS         for so long the last result is told                default: 168
set -uo pipefail
umask 027

style=${1:-}
case $style in
    nagios) ok=0 failed=2 unknown=3 word=UNKNOWN ;;
    npd) ok=0 failed=1 unknown=2 word= ;;
    *) echo "UNKNOWN - say nagios or npd: $0 nagios"; exit 3 ;;
esac
settings=${BITWITNESS_SETTINGS:-/etc/bitwitness/monitor.env}
set -a  # also for the programs below: slurmd and monitors start this with little in the environment
# shellcheck source=/dev/null
[ -r "$settings" ] && . "$settings"
set +a
limit=${BITWITNESS_SCAN_TIMEOUT:-50}
state=${BITWITNESS_STATE:-/var/lib/bitwitness/monitor}
read -r -a options <<<"${BITWITNESS_SCAN:---minutes 0.3}"

unsure() {
    local line=${word:+BITWITNESS $word - }"not judged: $*"
    line=$(printf '%s' "$line" | tr -c '[:print:]' ' ' | tr '|' '/')
    [ "$style" = npd ] && line=${line:0:80}
    echo "$line"
    exit "$unknown"
}

idle() {
    if [ -n "${BITWITNESS_IDLE:-}" ]; then
        timeout -k 2 10 bash -c "$BITWITNESS_IDLE" >/dev/null 2>&1
    elif command -v nvidia-smi >/dev/null; then
        local programs
        programs=$(timeout -k 2 10 nvidia-smi --query-compute-apps=pid --format=csv,noheader 2>/dev/null) || return 1
        [ -z "$programs" ]
    fi
}

if ! mkdir -p "$state" 2>/dev/null || ! cd "$state"; then unsure "$state cannot be made"; fi
if [ -s "failed.$style" ]; then
    cat "failed.$style"
    exit "$failed"
fi
exec 9>.lock
if ! flock -n 9 || ! idle; then
    if [ -s "ok.$style" ] && [ -n "$(find "ok.$style" -mmin "-$((60 * ${BITWITNESS_HOURS:-168}))")" ]; then
        cat "ok.$style"
        exit "$ok"
    fi
    unsure "the devices are in use, and no scan has passed of late"
fi

work=$(mktemp -d running.XXXXXX) || unsure "$state cannot be written"
trap 'rm -rf "$state/$work"' EXIT
said=$(timeout -k 2 "$limit" "${BITWITNESS:-bitwitness}" scan --exit-codes "$style" --out "$state/$work/scan" "${options[@]}" \
    2>"$work/errors" </dev/null 9>&-)
code=$?
first=${said%%$'\n'*}
case $code in
    124 | 137) unsure "the scan did not end within $limit s" ;;
esac
# A Python that cannot start ends with 1, and a mistake in an option with 2: the code alone is no verdict.
case $style:$code:$first in
    "nagios:0:BITWITNESS OK - drill "* | "npd:0:pass: drill "*) ;;  # which is no pass to be told later
    "nagios:0:BITWITNESS OK - "* | "npd:0:pass: "*)
        printf '%s\n' "$first" >"$work/ok" && mv -f "$work/ok" "ok.$style"
        ;;
    "nagios:2:BITWITNESS CRITICAL - "* | "npd:1:fail: "*)
        printf '%s\n' "$first" >"$work/failed" && mv -f "$work/failed" "failed.$style"
        mv "$work" "$(date -u +%Y%m%dT%H%M%SZ)-fail"
        ;;
    "nagios:3:BITWITNESS UNKNOWN - "* | "npd:2:not judged: "*) ;;
    *) unsure "the scan ended with $code: ${first:-$(tail -n 1 "$work/errors")}" ;;
esac
echo "$first"
exit "$code"
