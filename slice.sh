#!/usr/bin/env bash
# A TPU slice from a laptop with gcloud: ./slice.sh COMMAND NAME ZONE [...]
#
#   create NAME ZONE TYPE [--spot]    requests a slice and waits until it is
#                                     active; TYPE is v3-32, v4-32, v5e-16,
#                                     v5p-8, v6e-8, tpu7x-8, ..., or several
#                                     slices of one type, such as 2xv5e-256;
#                                     a second call only waits
#   setup  NAME ZONE                  copies the last commit to all workers and
#                                     runs prepareTPUVM.sh on each
#   check  NAME ZONE [key=value ...]  checks every worker (zero-train --doctor)
#                                     with the arguments of the launch
#   launch NAME ZONE [key=value ...]  trains in tmux on all workers, from the
#                                     newest checkpoint if any (trainLoop.sh);
#                                     passes on WANDB_API_KEY, if set here, in a
#                                     file that only the user can read
#   watch  NAME ZONE                  shows the log of worker 0; Ctrl-C only ends
#                                     watching
#   view   NAME ZONE [PORT]           serves the run directories of worker 0,
#                                     with reports, on localhost:PORT (8000)
#   stop   NAME ZONE                  makes all workers save a checkpoint
#                                     together and exit
#   kill   NAME ZONE                  kills training on all workers at once,
#                                     without a checkpoint
#   delete NAME ZONE                  deletes the slice and stops billing
#   keep   NAME ZONE TYPE [--spot] [key=value ...]
#                                     all of these until training is finished;
#                                     requests the slice again when a request
#                                     fails or the slice is preempted
#   bucket NAME LOCATION              creates a bucket for checkpoints and data,
#                                     in a location such as us-central1
#
# create and keep pass options to
# `gcloud compute tpus queued-resources create`; keep takes them as
# --option=value.
set -euo pipefail

usage() { sed -n '/^#!/d; /^#/!q; s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; } # the comment at the head of this file

case ${1:-} in
    -h | --help) usage && exit ;;
esac
cd "$(dirname "${BASH_SOURCE[0]}")"

. launch/exit-statuses.sh

fail() {
    printf 'slice.sh: %s\n' "$1" >&2
    exit 1
}

(($# >= 3)) || fail "expected COMMAND NAME ZONE; ./slice.sh --help lists the commands"
command=$1 name=$2 zone=$3
slices= # how many; "" before it is known
shift 3
key=$HOME/.ssh/google_compute_engine # gcloud's
poll=${SLICE_POLL_SECONDS:-30}
patience=10 # states in a row that gcloud cannot tell, until create gives up

# -- on a worker, in the home directory: on_workers sends the text of these functions ----------------------------------

is_training() { tmux has-session -t =zero 2>/dev/null; } # without = the name would match the start of another's

enter() {
    cd zero 2>/dev/null && return
    echo "$(hostname) is not set up: ./slice.sh setup does so"
    return 1
}

processes() { # 'PROGRAM SCRIPT': prints the ids of those in zero/; a search for text would find the shell that searches
    local process words
    for process in /proc/[0-9]*; do
        [[ $process/cwd -ef zero ]] || continue
        mapfile -d '' -t words <"$process/cmdline"
        # shellcheck disable=SC2053  # a pattern
        [[ ${#words[@]} -lt 2 || "${words[0]##*/} ${words[1]##*/}" != $1 ]] || echo "${process#/proc/}"
    done 2>/dev/null # of those that end meanwhile
}

unpack() { # the archive of a commit, and sets up
    set -o pipefail
    mkdir -p zero && cd zero || return
    tar -tzf ../zero.tar.gz | grep -v '/$' | sort >.files.new || return
    # What the commit before had and this one does not; what training and people have written stays.
    if [[ -e .files ]]; then comm -23 .files .files.new | xargs -r -d '\n' rm -f -- || return; fi
    mv .files.new .files && tar -xzf ../zero.tar.gz && rm ../zero.tar.gz && ./prepareTPUVM.sh
}

examine() { # [key=value ...]: each line begins with the name of the worker; a worker that trains has no free devices
    if is_training; then
        echo "$(hostname) is training: stop it first"
        return 1
    fi
    set -o pipefail
    enter && .venv/bin/python main_zero.py --doctor "$@" | sed "s/^/$(hostname): /"
}

private_file() { enter && install -m 600 /dev/null .environment; }

start_training() { # [key=value ...]: not where training runs: a launch that reached only some workers can be repeated
    if is_training; then
        echo "$(hostname) is training already"
        return
    fi
    enter || return
    echo running >train.status # the status of an earlier launch says nothing about this one
    # shellcheck disable=SC2016  # for the shell in tmux
    tmux new-session -d -s zero bash -c './trainLoop.sh "$@" 2>&1 | tee -ia train.log' trainLoop.sh "$@" && return
    rm train.status
    return 1
}

stop_training() { # by the loop: what is typed into tmux is lost while somebody scrolls there
    local loops
    loops=$(processes 'bash trainLoop.sh')
    if [[ -z $loops ]]; then
        echo "$(hostname) is not training"
        return
    fi
    # shellcheck disable=SC2086  # several words
    kill -s TERM $loops
}

kill_training() { # the loop first, which would start another trainer
    local program found
    for program in 'bash trainLoop.sh' 'python* main_zero.py'; do
        found=$(processes "$program")
        [[ -n $found ]] || continue
        # shellcheck disable=SC2086  # several words
        kill -s KILL $found
        echo 137 >zero/train.status # which the loop would have written
    done
    tmux kill-session -t =zero 2>/dev/null || true # it ends by itself, unless something else runs there
}

training_status() { # none before a launch, lost if the machine was restarted
    local status
    status=$(cat zero/train.status 2>/dev/null || echo none)
    status=${status:-running}
    [[ $status != running ]] || is_training || status=lost
    echo "$status"
}

show_log() { tail -n 50 -F zero/train.log; }

serve_runs() { cd zero/runs && python3 -m http.server "$1" --bind 127.0.0.1; }

# -- here --------------------------------------------------------------------------------------------------------------

# Bash ignores errexit in a function that is called in a condition, as keep calls most of these. So each of them returns
# the status of a failed command itself.

tpus() { gcloud compute tpus "$@" "--zone=$zone"; }

# gcloud connects to all workers at the same time: it refuses to copy files to them if the ssh-agent lacks its key, and
# without an agent each connection would ask for the passphrase.
add_key() {
    # The first connection makes the key.
    [[ -r $key ]] || tpus tpu-vm ssh "$(nodes | head -n 1)" --worker=0 --command=true || return
    if [[ -z ${SSH_AUTH_SOCK:-} ]]; then
        # shellcheck disable=SC2016  # as it is typed
        ssh-keygen -y -P '' -f "$key" >/dev/null 2>&1 ||
            fail "$key has a passphrase, and no ssh-agent runs that could ask for it once: "'eval "$(ssh-agent)"'
    elif ! ssh-add -L 2>/dev/null | grep -qF "$(cut -d ' ' -f 2 "$key.pub")"; then
        ssh-add "$key"
    fi
}

nodes() { # the names of the slices, as gcloud makes them of the prefix
    local number
    if ((slices == 1)); then
        echo "$name"
    else
        for ((number = 0; number < slices; number++)); do echo "$name-$number"; done
    fi
}

count_slices() { # asks gcloud, unless a TYPE has told
    local now type count
    [[ -z $slices ]] || return 0
    read_answer && slices=${count:-1}
}

on_slices() { # COMMAND ...: runs it with each NODE as its last argument, on all at the same time
    local node ids=() id status=0
    if ((slices == 1)); then
        "$@" "$name"
        return
    fi
    for node in $(nodes); do
        "$@" "$node" &
        ids+=($!)
    done
    for id in "${ids[@]}"; do wait "$id" || status=$?; done
    return "$status"
}

on_workers() { # all|0 [--ssh-flag=...] FUNCTION [ARGUMENT ...]: runs a function of those above; 0 is of the first slice
    local worker=$1 flags=()
    shift
    while [[ $1 == --* ]]; do
        flags+=("$1")
        shift
    done
    flags+=("--command=$(declare -f is_training enter processes "$1"); $(printf '%q ' "$@")")
    count_slices || return
    if [[ $worker == all ]]; then
        add_key && on_slices connect all "${flags[@]}"
    else
        connect "$worker" "${flags[@]}" "$(nodes | head -n 1)"
    fi
}

connect() { # WORKER [FLAG ...] NODE
    local worker=$1 node=${*: -1}
    # Without </dev/null ssh would read the standard input of a loop around slice.sh.
    tpus tpu-vm ssh "$node" "--worker=$worker" "${@:2:$#-2}" </dev/null
}

to_workers() { # FILE PLACE
    count_slices && add_key && on_slices copy "$1" "$2"
}

copy() { # FILE PLACE NODE
    tpus tpu-vm scp "$1" "$3:$2" --worker=all
}

state() { # prints it, the type and the number of the slices (nothing for one), nothing if there is no such request;
    # fails where gcloud cannot tell
    local errors status=0 fields
    errors=$(mktemp) || return
    fields="state.state,tpu.nodeSpec[0].node.acceleratorType.basename(),tpu.nodeSpec[0].multisliceParams.nodeCount"
    # Without </dev/null gcloud might ask for a password, by a question that nobody would see.
    tpus queued-resources describe "$name" "--format=value($fields)" 2>"$errors" </dev/null || status=$?
    if ((status)); then
        if grep -q NOT_FOUND "$errors"; then status=0; else cat "$errors" >&2; fi
    fi
    rm "$errors"
    return "$status"
}

read_answer() { # sets now, type and count
    local answer
    now='' type='' count=''
    answer=$(state) || return
    read -r now type count <<<"$answer" || true
}

read_state() { # TYPE: sets now; unknown where gcloud cannot tell
    local type count
    read_answer || now=unknown
    type=${type/#v5litepod-/v5e-}
    [[ -z $count ]] || type=${count}x$type
    [[ -z $type || $type == "${1/v5litepod-/v5e-}" ]] || fail "$name exists already, as $type instead of $1: choose another name, or
  ./slice.sh delete $name $zone"
}

read_type() { # TYPE: sets slices, accelerator and version, that of the machine image; a misspelled one ends here
    slices=1 accelerator=$1
    if [[ $1 =~ ^([2-9]|[1-9][0-9]+)x(.+)$ ]]; then
        slices=${BASH_REMATCH[1]} accelerator=${BASH_REMATCH[2]}
    fi
    accelerator=${accelerator/#v5e-/v5litepod-} # Google's name of it
    version=$(runtime_version "$accelerator") || return
}

runtime_version() { # cloud.google.com/tpu/docs/runtimes
    case $1 in
        v2-* | v3-* | v4-*) echo tpu-ubuntu2204-base ;;
        v5litepod-*) echo v2-alpha-tpuv5-lite ;;
        v5p-*) echo v2-alpha-tpuv5 ;;
        v6e-*) echo v2-alpha-tpuv6e ;;
        tpu7x-*) echo v2-alpha-tpu7-ubuntu2404 ;;
        *) fail "type $1: expected v2-, v3-, v4-, v5e-, v5p-, v6e- or tpu7x- and a number" ;;
    esac
}

request() { # [OPTION ...]: of the type that was read
    local named=("--node-id=$name")
    ((slices == 1)) || named=("--node-count=$slices" "--node-prefix=$name")
    tpus queued-resources create "$name" "${named[@]}" "--accelerator-type=$accelerator" "--runtime-version=$version" "$@"
}

pause() { # REASON
    echo "$name: $1; checking again in $poll s"
    sleep "$poll"
}

create() {
    local now accelerator version untold=0
    read_type "$1"
    read_state "$1"
    [[ $now != unknown ]] || fail "gcloud could not tell whether $name exists (its error is above)"
    if [[ -z $now ]]; then request "${@:2}"; else echo "$name exists already, so it is not requested again."; fi
    while true; do
        read_state "$1"
        case $now in
            ACTIVE) break ;;
            FAILED | SUSPENDED) fail "$name is $now; ./slice.sh delete $name $zone, then create it again" ;;
            "" | unknown)
                ((++untold < patience)) || fail "$name: gcloud told no state $patience times in a row"
                pause "gcloud tells no state"
                ;;
            *)
                untold=0
                pause "the request is $now"
                ;;
        esac
    done
    echo "$name is active."
}

setup() {
    local archive status=0
    archive=$(mktemp -d) || return
    git archive --format=tar.gz -o "$archive/zero.tar.gz" HEAD &&
        to_workers "$archive/zero.tar.gz" "" &&
        on_workers all unpack || status=$?
    rm -r "$archive"
    return "$status"
}

hand_over_key() { # never as an argument: other users of a machine see those
    local folder status=0
    [[ -n ${WANDB_API_KEY:-} ]] || return 0
    folder=$(mktemp -d) || return
    (umask 077 && printf 'export WANDB_API_KEY=%q\n' "$WANDB_API_KEY" >"$folder/environment") &&
        on_workers all private_file &&
        to_workers "$folder/environment" zero/.environment || status=$?
    rm -r "$folder"
    return "$status"
}

launch() {
    hand_over_key && on_workers all start_training "$@"
}

# With a terminal, -tt, the remote command ends when the connection does; else it would keep the port.
watch_log() { on_workers 0 --ssh-flag=-tt show_log; }

view() {
    local port=${1:-8000}
    echo "http://localhost:$port; Ctrl-C ends only the viewing"
    on_workers 0 --ssh-flag=-tt --ssh-flag=-oExitOnForwardFailure=yes "--ssh-flag=-L$port:localhost:$port" serve_runs "$port"
}

bucket() { gcloud storage buckets create "gs://$name" "--location=$zone" --uniform-bucket-level-access; }

delete() { tpus queued-resources delete "$name" --force --quiet; }

keep() {
    local type=$1 options=() arguments=() now status outcome meaning is_ours=false accelerator version
    shift
    while (($#)); do
        case $1 in
            --*) options+=("$1") ;;
            *=* | ~*) arguments+=("$1") ;;
            *) fail "keep: $1 is neither an option (one word each, as in --valid-until-duration=6h) nor key=value" ;;
        esac
        shift
    done
    read_type "$type"
    if [[ -r $key ]]; then add_key; fi # asks for a passphrase now, while somebody is there
    while true; do
        read_state "$type"
        case $now in
            ACTIVE)
                status=$(on_workers 0 training_status) || status=unreachable
                status=${status##*$'\n'} # a shell may greet
                explain_status "$status"
                if [[ $status == unreachable ]]; then
                    pause "worker 0 is unreachable"
                elif [[ -z $status ]]; then
                    pause "worker 0 did not report its status"
                elif [[ $status == running ]]; then
                    is_ours=true
                    sleep "$poll"
                elif [[ $status == none ]] || ! $is_ours; then # how an earlier run ended does not matter
                    if setup && launch ${arguments[@]+"${arguments[@]}"}; then is_ours=true; else pause "setup or launch failed"; fi
                elif [[ $outcome == finished ]]; then
                    echo "$name has finished; ./slice.sh delete $name $zone stops billing."
                    return
                elif [[ $outcome == stopped || $status == lost ]]; then # as before a preemption; if the slice stays, continue
                    sleep "$poll"
                    read_state "$type"
                    [[ $now != ACTIVE ]] || launch ${arguments[@]+"${arguments[@]}"} || pause "launch failed"
                else
                    fail "status $status: $meaning; ./slice.sh watch $name $zone shows more"
                fi
                ;;
            SUSPENDED | FAILED)
                if delete; then pause "a request that was $now is deleted"; else pause "could not be deleted"; fi
                ;;
            "")
                status=0
                request ${options[@]+"${options[@]}"} || status=$?
                ((status != 2)) || fail "gcloud does not accept these options (its error is above)"
                ((status == 0)) || pause "the request was refused"
                ;;
            unknown) pause "gcloud cannot tell its state (its error is above)" ;;
            *) pause "the request is $now" ;;
        esac
    done
}

case $command in
    create | keep)
        (($#)) || fail "$command needs a TYPE, such as v3-32"
        "$command" "$@"
        ;;
    check) on_workers all examine "$@" ;;
    launch | view) "$command" "$@" ;;
    kill | stop) on_workers all "${command}_training" ;;
    watch) watch_log ;;
    setup | delete | bucket) "$command" ;;
    *) fail "unknown command $command; ./slice.sh --help lists them" ;;
esac
