#!/usr/bin/env bash
# A TPU slice from a laptop that has gcloud: ./slice.sh COMMAND NAME ZONE [...]
#
#   create NAME ZONE TYPE [--spot]       requests a slice (v3-32, v4-32, v5litepod-16, ...) and waits until it is active
#   setup  NAME ZONE                     copies the last commit to all workers and runs prepareTPUVM.sh on each
#   check  NAME ZONE [key=value ...]     examines every worker (zero-train --doctor), with the arguments of the launch
#   launch NAME ZONE [key=value ...]     trains in tmux on all workers, from the newest checkpoint if any (trainLoop.sh);
#                                        hands over WANDB_API_KEY, if it is set here, in a file that only the user reads
#   watch  NAME ZONE                     shows the log of worker 0; Ctrl-C ends only the watching
#   view   NAME ZONE [PORT]              serves the run directories of worker 0, reports included, on localhost:PORT (8000)
#   stop   NAME ZONE                     sends Ctrl-C to all workers: they save a checkpoint together and end
#   kill   NAME ZONE                     ends training on all workers at once, without a checkpoint
#   delete NAME ZONE                     deletes the slice and ends its cost
#   keep   NAME ZONE TYPE [--spot] [key=value ...]
#                                        all of these until training has finished: a slice that is refused, fails or is
#                                        preempted is requested again
#   bucket NAME LOCATION                 makes a bucket for checkpoints and data, such as in us-central1
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

fail() {
    printf 'slice.sh: %s\n' "$1" >&2
    exit 1
}

(($# >= 3)) || fail "expected COMMAND NAME ZONE; the comment at the top of this file lists the commands"
command=$1 name=$2 zone=$3
shift 3
poll=${SLICE_POLL_SECONDS:-30}
directory=zero # on each worker, in the home directory

# Bash ignores errexit in a function that is called in a condition, as keep calls most of these. So each of them returns
# the status of a failed command itself.

tpus() { gcloud compute tpus "$@" "--zone=$zone"; }

# Without </dev/null ssh would read the standard input of a loop around slice.sh.
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

request() {
    local type=$1 version
    shift
    version=$(runtime_version "$type") || return
    tpus queued-resources create "$name" "--node-id=$name" "--accelerator-type=$type" "--runtime-version=$version" "$@"
}

create() {
    local now
    request "$@"
    while now=$(state) && [[ $now != ACTIVE ]]; do
        [[ $now != FAILED && $now != SUSPENDED ]] ||
            fail "$name is $now; ./slice.sh delete $name $zone, then create it again"
        echo "$name is ${now:-not listed yet}; checking again in $poll s"
        sleep "$poll"
    done
    echo "$name is active."
}

setup() {
    local archive status=0
    archive=$(mktemp -d) || return
    git archive --format=tar.gz -o "$archive/zero.tar.gz" HEAD &&
        tpus tpu-vm scp "$archive/zero.tar.gz" "$name:" --worker=all &&
        on_workers all "mkdir -p $directory && tar -xzf zero.tar.gz -C $directory && $directory/prepareTPUVM.sh" ||
        status=$?
    rm -r "$archive"
    return "$status"
}

quoted() { # for the shell that ssh starts
    (($# == 0)) || printf ' %q' "$@"
}

check() { # each line begins with the name of the worker; a worker that trains has no free devices
    on_workers all "cd $directory && \
        if tmux has-session -t zero 2>/dev/null; then echo \"\$(hostname) is training: stop it first\"; exit 1; fi; \
        set -o pipefail; .venv/bin/python main_zero.py --doctor$(quoted "$@") | sed \"s/^/\$(hostname): /\""
}

hand_over_key() { # never as an argument: other users of a machine see those
    local folder status=0
    [[ -n ${WANDB_API_KEY:-} ]] || return 0
    folder=$(mktemp -d) || return
    (umask 077 && printf 'export WANDB_API_KEY=%q\n' "$WANDB_API_KEY" >"$folder/environment") &&
        on_workers all "install -m 600 /dev/null $directory/.environment" &&
        tpus tpu-vm scp "$folder/environment" "$name:$directory/.environment" --worker=all || status=$?
    rm -r "$folder"
    return "$status"
}

launch() { # on the workers that do not train already: a launch that reached only some of them can be repeated
    local arguments
    hand_over_key || return
    arguments=$(quoted "$@")
    # %q twice: once for the shell that ssh starts, once for the one that tmux starts
    on_workers all "cd $directory && \
        if tmux has-session -t zero 2>/dev/null; then echo \"\$(hostname) is training already\"; \
        else tmux new-session -d -s zero $(printf '%q' "./trainLoop.sh$arguments 2>&1 | tee -ia train.log"); fi"
}

view() {
    local port=${1:-8000}
    echo "http://localhost:$port; Ctrl-C ends only the viewing"
    tpus tpu-vm ssh "$name" --worker=0 "--ssh-flag=-L$port:localhost:$port" \
        "--command=cd $directory/runs && python3 -m http.server $port --bind 127.0.0.1" </dev/null
}

bucket() { gcloud storage buckets create "gs://$name" "--location=$zone" --uniform-bucket-level-access; }

kill_training() { on_workers all "pkill -KILL -f trainLoop.sh; pkill -KILL -f main_zero.py; tmux kill-session -t zero"; }

stop() { on_workers all "tmux send-keys -t zero C-c"; }

delete() { tpus queued-resources delete "$name" --force --quiet; }

training_status() { # train.status of worker 0: none before a launch, lost if the machine was restarted
    on_workers 0 "status=\$(cat $directory/train.status 2>/dev/null || echo none); \
        status=\${status:-running}; \
        [ \$status != running ] || tmux has-session -t zero 2>/dev/null || status=lost; echo \$status"
}

pause() {
    echo "$name: $1; checking again in $poll s"
    sleep "$poll"
}

keep() {
    local type=$1 options=() now status
    shift
    while (($#)) && [[ $1 == --* ]]; do
        options+=("$1")
        shift
    done
    runtime_version "$type" >/dev/null # a misspelt type ends here
    while true; do
        now=$(state)
        case $now in
            ACTIVE)
                status=$(training_status) || status=unreachable
                case $status in
                    0) echo "$name has finished; ./slice.sh delete $name $zone ends its cost." && return ;;
                    none) { setup && launch "$@"; } || pause "setup or launch failed" ;;
                    running) sleep "$poll" ;;
                    "") pause "worker 0 did not report its status" ;;
                    unreachable) pause "worker 0 is unreachable" ;;
                    75 | 129 | 130 | 143 | lost) # stopped by a signal, as before a preemption; if the slice stays, continue
                        sleep "$poll"
                        [[ $(state) != ACTIVE ]] || launch "$@" || pause "launch failed"
                        ;;
                    2) fail "training refused its settings (status 2); ./slice.sh watch $name $zone shows which" ;;
                    134) fail "a library aborted (SIGABRT, status 134), XLA most likely; ./slice.sh watch $name $zone shows why" ;;
                    *) fail "training ended with status $status; ./slice.sh watch $name $zone shows why" ;;
                esac
                ;;
            SUSPENDED | FAILED)
                if delete; then pause "a request that was $now is deleted"; else pause "could not be deleted"; fi
                ;;
            "") request "$type" ${options[@]+"${options[@]}"} || pause "the request was refused" ;;
            *) pause "the request is $now" ;;
        esac
    done
}

case $command in
    create | keep)
        (($#)) || fail "$command needs a TYPE, such as v3-32"
        "$command" "$@"
        ;;
    check | launch | view) "$command" "$@" ;;
    kill) kill_training ;;
    watch) on_workers 0 "tail -n 50 -f $directory/train.log" ;;
    setup | stop | delete | bucket) "$command" ;;
    *) fail "unknown command $command; the comment at the top of this file lists them" ;;
esac
