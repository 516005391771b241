#!/usr/bin/env bash
# Trains until finished or stopped by a signal: ./trainLoop.sh [key=value ...]
#
# Every start is main_zero.py --resume=auto: it resumes from the newest checkpoint, or starts if there is none. A start
# that fails is repeated after a pause, until ten in a row have failed within ten minutes each. Starts are not repeated
# if they were stopped by a signal (75: after saving a checkpoint; 129, 130, 138, 143: before there was anything to save)
# or refused their settings (2). train.status holds the last status.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")" || exit 1

# shellcheck source=/dev/null
[[ ! -r .environment ]] || . ./.environment # from slice.sh launch

stopped=0 trainer=
# A container signals only its first process; a terminal, or a machine that shuts down, signals all. A trainer counts
# SIGUSR1 and another signal as one request to stop.
trap 'stopped=1; [[ -z $trainer ]] || kill -s USR1 "$trainer" 2>/dev/null' HUP INT TERM

record() { # by a rename: slice.sh may read it at any time
    echo "$1" >train.status.new && mv train.status.new train.status
}

record running
failures=0
while true; do
    started=$SECONDS
    .venv/bin/python main_zero.py --resume=auto "$@" &
    trainer=$!
    while true; do # a signal ends wait, but not the trainer
        wait "$trainer"
        status=$?
        kill -0 "$trainer" 2>/dev/null || break
    done
    trainer=
    case $status in 0 | 2 | 75 | 129 | 130 | 138 | 143) break ;; esac
    ((stopped)) && break
    ((SECONDS - started > 600)) && failures=0
    ((status == 134)) && echo "trainLoop.sh: a library aborted (SIGABRT), XLA most likely; see its last lines above" >&2
    ((++failures < ${TRAIN_ATTEMPTS:-10})) || break
    echo "trainLoop.sh: status $status; starting again in ${TRAIN_PAUSE_SECONDS:-30} s" >&2
    sleep "${TRAIN_PAUSE_SECONDS:-30}" &
    wait $! # a signal ends the pause
    ((stopped)) && break
done
record "$status"
exit "$status"
