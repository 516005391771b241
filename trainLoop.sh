#!/usr/bin/env bash
# Trains until finished or stopped by a signal: ./trainLoop.sh [key=value ...]
#
# Each start is main_zero.py --resume=auto: it resumes from the newest
# checkpoint, or starts if there is none. A failed start is repeated after a
# pause, until ten in a row have failed within ten minutes each. It is not
# repeated if training is finished, was stopped by a signal, or would fail again
# with the same error (launch/exit-statuses.sh lists the statuses). train.status
# holds the last status.
set -uo pipefail

usage() { sed -n '/^#!/d; /^#/!q; s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; } # the comment at the head of this file

case ${1:-} in
    -h | --help) usage && exit ;;
esac
cd "$(dirname "${BASH_SOURCE[0]}")" || exit 1

. launch/exit-statuses.sh || exit 1
# shellcheck source=/dev/null
[[ ! -r .environment ]] || . ./.environment # from slice.sh launch

say() { echo "trainLoop.sh: $1" >&2; }

stopped=0 trainer=
# A container signals only its first process; a terminal, or a machine that shuts down, signals all. A trainer counts
# SIGUSR1 and another signal as one request to stop.
forward_stop() { [[ -z $trainer ]] || kill -s USR1 "$trainer" 2>/dev/null; }
trap 'stopped=1; forward_stop' HUP INT TERM

record() { # by a rename: slice.sh may read it at any time
    echo "$1" >train.status.new && mv train.status.new train.status
}

record running
attempts=${TRAIN_ATTEMPTS:-10} pause=${TRAIN_PAUSE_SECONDS:-30}
failures=0
while true; do
    started=$SECONDS
    .venv/bin/python main_zero.py --resume=auto "$@" &
    trainer=$!
    ((stopped == 0)) || forward_stop # the signal came before $trainer was known
    while true; do # a signal ends wait, but not the trainer
        wait "$trainer"
        status=$?
        kill -0 "$trainer" 2>/dev/null || break
    done
    trainer=
    explain_status "$status"
    [[ $outcome == finished ]] || say "status $status: $meaning"
    [[ $outcome == failed ]] || break
    ((stopped)) && break
    ((SECONDS - started > 600)) && failures=0
    if ((++failures >= attempts)); then
        say "gave up after $attempts failed starts in a row"
        break
    fi
    say "starting again in $pause s"
    sleep "$pause" >/dev/null 2>&1 & # not with the log open: its reader would wait for the end of a pause that a signal cut
    wait $!                          # a signal ends the pause
    ((stopped)) && break
done
record "$status"
exit "$status"
