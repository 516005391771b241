# shellcheck shell=bash disable=SC2034  # outcome and meaning are for those who call
# The exit statuses of the trainer, and what follows from each. trainLoop.sh, slice.sh and launch/slurm.sbatch read this
# list; a test compares docs/reference/exit-statuses.md and the other launchers with it. Any status that it lacks is a failure.

explain_status() { # STATUS: sets outcome and meaning
    local status
    while read -r status outcome meaning; do
        [[ $status != "$1" ]] || return 0
    done <<'LIST'
0 finished training has finished
2 refused the same command would be refused again, for a misspelled key for example
75 stopped a signal stopped training, after a checkpoint was saved
126 refused .venv/bin/python cannot be run: call prepareTPUVM.sh
127 refused there is no .venv/bin/python: call prepareTPUVM.sh
129 stopped SIGHUP came before there was anything to save
130 stopped SIGINT (Ctrl-C) came before there was anything to save, or for the second time
134 failed a library aborted (SIGABRT), XLA most likely
137 failed the trainer was killed (SIGKILL), by hand or because memory ran out
138 stopped SIGUSR1, from trainLoop.sh, came before there was anything to save
143 stopped SIGTERM came before there was anything to save, or for the second time
LIST
    outcome=failed
    meaning="training failed"
}
