#!/usr/bin/env bash
# A TPU slice from a laptop that has gcloud: ./slice.sh COMMAND NAME ZONE [...]
#
#   create NAME ZONE TYPE [--spot]       asks for a slice (v3-32, v4-32, v5litepod-16, ...) and waits until it is there
#   setup  NAME ZONE                     copies this commit to all workers and runs prepareTPUVM.sh on each
#   launch NAME ZONE [key=value ...]     trains in tmux on all workers, resuming what stands (trainLoop.sh)
#   watch  NAME ZONE                     shows what worker 0 prints; Ctrl-C ends the watching only
#   stop   NAME ZONE                     Ctrl-C on all workers: they save a checkpoint together and end
#   delete NAME ZONE                     ends the slice and its cost
#   keep   NAME ZONE TYPE [--spot] [key=value ...]
#                                        all of these until training is finished: a preempted slice is asked for again
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

fail() {
    printf 'slice.sh: %s\n' "$1" >&2
    exit 1
}

(($# >= 3)) || fail "expected COMMAND NAME ZONE; the head of this file lists the commands"
command=$1 name=$2 zone=$3
shift 3
poll=${SLICE_POLL_SECONDS:-30}
directory=zero # on each worker, under its home

tpus() { gcloud compute tpus "$@" "--zone=$zone"; }

# stdin stays here: ssh would swallow that of a loop around it
on_workers() { tpus tpu-vm ssh "$name" "--worker=$1" "--command=$2" </dev/null; }

state() { tpus queued-resources describe "$name" '--format=value(state.state)' 2>/dev/null || true; }

runtime_version() { # of the machine image: cloud.google.com/tpu/docs/runtimes
    case $1 in
        v2-* | v3-* | v4-*) echo tpu-ubuntu2204-base ;;
        v5litepod-*) echo v2-alpha-tpuv5-lite ;;
        v5p-*) echo v2-alpha-tpuv5 ;;
        v6e-*) echo v2-alpha-tpuv6e ;;
        *) fail "type $1: expected v2-, v3-, v4-, v5litepod-, v5p- or v6e- and a number" ;;
    esac
}

create() {
    local type=$1 version
    shift
    version=$(runtime_version "$type")
    tpus queued-resources create "$name" "--node-id=$name" "--accelerator-type=$type" "--runtime-version=$version" "$@"
    wait_until_active
}

wait_until_active() {
    local now
    while now=$(state) && [[ $now != ACTIVE ]]; do
        [[ $now != FAILED && $now != SUSPENDED ]] || fail "$name is $now; ./slice.sh delete $name $zone, then create it again"
        echo "$name is ${now:-not there yet}; looking again in $poll s"
        sleep "$poll"
    done
    echo "$name is there."
}

setup() {
    local archive
    archive=$(mktemp -d)
    git archive --format=tar.gz -o "$archive/zero.tar.gz" HEAD
    tpus tpu-vm scp "$archive/zero.tar.gz" "$name:" --worker=all
    rm -r "$archive"
    on_workers all "mkdir -p $directory && tar -xzf zero.tar.gz -C $directory && $directory/prepareTPUVM.sh"
}

launch() {
    local arguments=""
    (($# == 0)) || arguments=$(printf ' %q' "$@")
    # %q twice: once for the shell that ssh starts, once for the one that tmux starts
    on_workers all "cd $directory && tmux new-session -d -s zero $(printf '%q' "./trainLoop.sh$arguments 2>&1 | tee -ia train.log")"
}

stop() { on_workers all "tmux send-keys -t zero C-c"; }

delete() { tpus queued-resources delete "$name" --force --quiet; }

keep() {
    local type=$1 options=() status
    shift
    while (($#)) && [[ $1 == --* ]]; do
        options+=("$1")
        shift
    done
    while true; do
        case $(state) in
            ACTIVE)
                # Nothing is there before the first launch; a worker that cannot be reached is looked for again.
                # Nobody is left to say how training ended where the machine was started anew: lost.
                status=$(on_workers 0 "status=\$(cat $directory/train.status 2>/dev/null || echo none); \
                    [ \$status != running ] || tmux has-session -t zero 2>/dev/null || status=lost; echo \$status") ||
                    status=unreachable
                case $status in
                    0) echo "$name has finished; ./slice.sh delete $name $zone ends its cost." && return ;;
                    none) setup && launch "$@" ;;
                    running | unreachable) sleep "$poll" ;;
                    75 | 129 | 130 | 143 | lost) # told to stop, as before a preemption; if the slice is still there later, go on
                        sleep "$poll"
                        [[ $(state) != ACTIVE ]] || launch "$@" || sleep "$poll"
                        ;;
                    *) fail "training ended with status $status; ./slice.sh watch $name $zone shows why" ;;
                esac
                ;;
            SUSPENDED | FAILED) delete ;;
            "") create "$type" "${options[@]}" || sleep "$poll" ;;
            *) sleep "$poll" ;;
        esac
    done
}

case $command in
    create | keep)
        (($#)) || fail "$command needs a TYPE, such as v3-32"
        "$command" "$@"
        ;;
    launch) launch "$@" ;;
    watch) on_workers 0 "tail -n 50 -f $directory/train.log" ;;
    setup | stop | delete) "$command" ;;
    *) fail "unknown command $command; the head of this file lists them" ;;
esac
