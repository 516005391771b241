#!/usr/bin/env bash
# Trains until finished or told to stop: ./trainLoop.sh [key=value ...]
#
# Every start is main_zero.py --resume=auto: it continues, or starts if nothing stands. A start that fails is repeated
# after a pause, ten times at most in a row that lasts no ten minutes each; one that was told to stop is not (75: and has
# saved; 129, 130, 143: before there was anything to save). train.status says how it ended.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")" || exit 1

told=0 # a machine that shuts down tells this script as well, which has to see how training ends
trap 'told=1' HUP INT TERM

echo running >train.status
for ((failures = 0; failures < ${TRAIN_ATTEMPTS:-10}; failures++)); do
    started=$SECONDS
    .venv/bin/python main_zero.py --resume=auto "$@"
    status=$?
    case $status in 0 | 75 | 129 | 130 | 143) break ;; esac
    ((told)) && break
    ((SECONDS - started > 600)) && failures=0
    echo "trainLoop.sh: status $status; starting again in ${TRAIN_PAUSE_SECONDS:-30} s" >&2
    sleep "${TRAIN_PAUSE_SECONDS:-30}"
    ((told)) && break
done
echo "$status" >train.status
exit "$status"
