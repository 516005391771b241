#!/usr/bin/env bash
# Trains until finished or stopped by a signal: ./trainLoop.sh [key=value ...]
#
# Every start is main_zero.py --resume=auto: it resumes from the newest checkpoint, or starts if there is none. A start
# that fails is repeated after a pause, until ten in a row have failed within ten minutes each. Not repeated are those
# that were stopped by a signal (75: after saving a checkpoint; 129, 130, 143: before there was anything to save) and those
# that refused their settings (2). train.status says how training ended.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")" || exit 1

stopped=0 # a machine that shuts down signals this script too, which has to live on to see how training ends
trap 'stopped=1' HUP INT TERM

echo running >train.status
failures=0
while true; do
    started=$SECONDS
    .venv/bin/python main_zero.py --resume=auto "$@"
    status=$?
    case $status in 0 | 2 | 75 | 129 | 130 | 143) break ;; esac
    ((stopped)) && break
    ((SECONDS - started > 600)) && failures=0
    ((status == 134)) && echo "trainLoop.sh: a library aborted (SIGABRT), XLA most likely; its last lines above say why" >&2
    ((++failures < ${TRAIN_ATTEMPTS:-10})) || break
    echo "trainLoop.sh: status $status; starting again in ${TRAIN_PAUSE_SECONDS:-30} s" >&2
    sleep "${TRAIN_PAUSE_SECONDS:-30}"
    ((stopped)) && break
done
echo "$status" >train.status
exit "$status"
