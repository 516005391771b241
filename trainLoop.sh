#!/usr/bin/env bash
# Trains until finished or told to stop: ./trainLoop.sh [key=value ...]
#
# Every start is main_zero.py --resume=auto: it continues, or starts if nothing stands. A start that fails is repeated
# after a pause, ten times at most; status 75 (told to stop, and saved) is not. train.status says how it ended.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")" || exit 1

echo running >train.status
for ((failures = 0; failures < ${TRAIN_ATTEMPTS:-10}; failures++)); do
    .venv/bin/python main_zero.py --resume=auto "$@"
    status=$?
    ((status == 0 || status == 75)) && break
    echo "trainLoop.sh: status $status; starting again in ${TRAIN_PAUSE_SECONDS:-30} s" >&2
    sleep "${TRAIN_PAUSE_SECONDS:-30}"
done
echo "$status" >train.status
exit "$status"
