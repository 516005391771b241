#!/usr/bin/env bash
# Sets up a machine: ./prepareTPUVM.sh [--plan] [--parquet] [--test]
#
# The machine is a TPU VM, a host with NVIDIA GPUs or a laptop. Creates .venv
# next to this file, with the trainer, the jax for this machine, and the tested
# versions in constraints.txt.
#   --plan     adds the TPU compiler, for mode=plan on a machine without a TPU
#              (x86-64 Linux only)
#   --parquet  adds pyarrow, so that zero-prepare can read Parquet and Arrow
#   --test     adds the test dependencies, including the TPU compiler and pyarrow
#   --help     prints this text
# Later calls keep what earlier ones added. If there is nothing to do, a call
# takes less than a second. uv installs the packages (pip fetches it temporarily
# if it is missing); if uv fails, pip installs them.
set -euo pipefail

usage() { sed -n '/^#!/d; /^#/!q; s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; } # the comment at the head of this file

fail() {
    printf 'prepareTPUVM.sh: %s\n  remedy: %s\n' "$1" "$2" >&2
    exit 1
}

with_plan=false with_parquet=false with_test=false
for argument in "$@"; do
    case $argument in
        --plan) with_plan=true ;;
        --parquet) with_parquet=true ;;
        --test) with_test=true ;;
        -h | --help) usage && exit ;;
        *) fail "unknown option $argument" "expected --plan, --parquet, --test or --help" ;;
    esac
done
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$repository"

# -- 1: the machine ---------------------------------------------------------------------------------------------------

has_tpu() { # chips are Google's PCI devices with a node in /dev: asking a metadata server could hang
    compgen -G '/dev/accel[0-9]*' >/dev/null || compgen -G '/dev/vfio/[0-9]*' >/dev/null || return 1
    grep -qsx 0x1ae0 /sys/bus/pci/devices/*/vendor
}

tpu_ids='0x0027 0x0056 0x005e 0x0062 0x0063 0x006f 0x0076 0x007c 0x0083' # of PCI; Google's network cards and disks have others

lacks_driver() { # a TPU without a device node; jax would use the CPU
    local device vendor id
    has_tpu && return 1
    for device in /sys/bus/pci/devices/*; do
        [[ -r $device/vendor && -r $device/device ]] || continue
        read -r vendor <"$device/vendor" && read -r id <"$device/device"
        [[ $vendor != 0x1ae0 || " $tpu_ids " != *" $id "* ]] || return 0
    done
    return 1
}

has_gpu() {
    [[ -e /dev/nvidia0 ]] || { command -v nvidia-smi && nvidia-smi --list-gpus | grep GPU; } >/dev/null 2>&1
}

has_package() { compgen -G ".venv/lib/python*/site-packages/$1" >/dev/null; }

if [[ ${JAX_PLATFORMS:-} != cpu ]] && lacks_driver; then
    fail "this machine has a TPU, but no /dev/accel* or /dev/vfio/* to reach it" \
        "in a container, start it with --privileged; on a VM, create it with a TPU image, as ./slice.sh create does; \
JAX_PLATFORMS=cpu sets up for the CPU"
fi

extras=(train)
if has_tpu; then
    machine="a TPU VM"
    extras+=(tpu)
elif has_gpu; then
    machine="an NVIDIA host"
    extras+=(cuda12)
else
    machine="a machine without accelerator: zero will use virtual CPU devices"
fi
if $with_plan && [[ $(uname -sm) != "Linux x86_64" ]]; then
    fail "--plan: the TPU compiler does not exist for $(uname -sm)" "plan on an x86-64 Linux machine"
fi
if $with_test || [[ -e .venv/bin/pytest ]]; then
    extras+=(test) # which brings the TPU compiler as well
elif ! has_tpu && { $with_plan || has_package libtpu; }; then
    extras+=(plan)
fi
if $with_parquet || { [[ ${extras[*]} != *test* ]] && has_package pyarrow; }; then
    extras+=(parquet)
fi
printf '[1/4] This is %s.\n' "$machine"

stamp=$(
    {
        cat pyproject.toml constraints.txt prepareTPUVM.sh
        echo "$repository ${extras[*]}" # an editable install contains its path
    } | cksum
)
if [[ $(cat .venv/zero-stamp 2>/dev/null) == "$stamp" ]] && .venv/bin/python -c '' 2>/dev/null; then
    echo "[4/4] .venv is up to date."
    exit 0
fi

scratch=$(mktemp -d) ticker=
trap '[[ -z $ticker ]] || kill "$ticker"; rm -rf "$scratch"' EXIT

find_uv() { # PYTHON with a pip: prints the path
    local fetched=$scratch/uv/bin/uv
    command -v uv && return
    [[ -x $fetched ]] || "$1" -m pip install -qq --disable-pip-version-check -c constraints.txt --target "$scratch/uv" uv >&2 &&
        echo "$fetched"
}

# -- 2 and 3: .venv with a Python of 3.11 or newer ---------------------------------------------------------------------

is_new_enough() { # runs it: a shim of pyenv may be on the PATH without its Python
    command -v "$1" >/dev/null && "$1" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

find_python() { # first the version that constraints.txt was tested with
    local candidate
    for candidate in python3.11 python3.12 python3.13 python3.14 python3; do
        if is_new_enough "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    return 1
}

python_from_apt() { # ignores release candidates, such as the 3.11 of Ubuntu 22.04
    local package root=()
    command -v apt-get >/dev/null || return 1
    if ((EUID != 0)); then
        sudo -n true 2>/dev/null || return 1
        root=(sudo -n)
    fi
    for package in python3.11 python3.12 python3.13; do
        if apt-cache policy "$package" | grep 'Candidate: [0-9]' | grep -qv '~rc'; then
            "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -qq -y "$package" "$package-venv" >&2
            command -v "$package"
            return
        fi
    done
    return 1
}

python_from_uv() { # Python stays in ~/.local/share/uv
    local uv
    uv=$(find_uv python3) &&
        "$uv" python install --quiet 3.12 >&2 &&
        "$uv" python find --managed-python 3.12
}

make_venv() {
    local python=$1
    if "$python" -c 'import ensurepip' 2>/dev/null; then
        "$python" -m venv --clear .venv
    else # Debian's python3 without python3-venv
        "$python" -m venv --clear --without-pip .venv &&
            "$python" -m pip --python .venv/bin/python install -qq pip
    fi
}

rm -f .venv/zero-stamp
if is_new_enough .venv/bin/python && .venv/bin/python -m pip --version >/dev/null 2>&1; then
    echo "[2/4] Python is .venv/bin/python ($(.venv/bin/python --version))."
    echo "[3/4] .venv exists."
else
    if ! python=$(find_python); then
        echo "[2/4] Found no Python 3.11 or newer (python3: $(python3 --version 2>&1 || echo none)); installing one."
        python=$(python_from_apt || python_from_uv) ||
            fail "could not install Python 3.11 or newer, neither with apt nor with uv" \
                "install it (with its venv module) so that python3.11, python3.12 or python3.13 is on the PATH"
    fi
    echo "[2/4] Python is $python ($("$python" --version))."
    echo "[3/4] Making .venv."
    make_venv "$python" ||
        fail "$python could not make .venv" "install its venv module (Debian, Ubuntu: apt install python3-venv)"
fi

# -- 4: the packages --------------------------------------------------------------------------------------------------

project=".[$(IFS=,; echo "${extras[*]}")]"

by_pip() { # -I: a package that is found through PYTHONPATH now may be missing later, so it is installed anyway
    .venv/bin/python -I -m pip install --progress-bar off --disable-pip-version-check -c constraints.txt -e "$project"
}

by_uv() { # with pip's settings, which uv does not read; they may say where another build of a package is, such as torch for CPU
    .venv/bin/python -I - "$uv" "$project" <<'PROGRAM'
import ast
import os
import subprocess
import sys

OPTIONS = {
    "constraint": "--constraint",
    "extra-index-url": "--extra-index-url",
    "find-links": "--find-links",
    "index-url": "--index-url",
    "trusted-host": "--allow-insecure-host",
}
# Settings of how pip works, and not of what it installs.
OTHERS = {
    *("cache-dir", "config-file", "default-timeout", "disable-pip-version-check", "log", "no-cache-dir", "no-color"),
    *("no-input", "progress-bar", "quiet", "require-virtualenv", "retries", "root-user-action", "timeout", "verbose"),
}

listed = subprocess.run([sys.executable, "-I", "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
settings = {}
for section in ("global", "install", ":env:"):  # each overrides those before
    for line in listed.stdout.splitlines():
        key, _, value = line.partition("=")
        if key.rpartition(".")[0] == section:
            settings[key.rpartition(".")[2]] = ast.literal_eval(value)

uv, project = sys.argv[1:]
environment = dict(os.environ)
# pip takes the best version of all indexes; uv would take the first index that has any.
command = [uv, "pip", "install", "--python", ".venv/bin/python", "--index-strategy", "unsafe-best-match"]
for name, value in settings.items():
    if name == "cert":
        environment["SSL_CERT_FILE"] = value
    elif name == "no-index":
        if value.lower() in ("1", "true", "yes", "on"):
            command.append("--no-index")
    elif name in OPTIONS:
        for word in value.split():
            command += [OPTIONS[name], word]
    elif name not in OTHERS:
        sys.exit(f"uv has no equivalent of pip's setting {name}")
command += ["-c", "constraints.txt", "-e", project]
sys.exit(subprocess.run(command, env=environment, stdin=subprocess.DEVNULL).returncode)
PROGRAM
}

show_progress() { # the seconds and the last line of the log: each second on a terminal, every 20 s elsewhere
    local seconds=0 line
    while sleep 1 >/dev/null; do
        ((++seconds))
        line="[4/4] $seconds s: $(tail -n 1 "$scratch/log")"
        if [[ -t 1 ]]; then
            printf '\r\033[?7l\033[K%s\033[?7h' "$line" # without wrapping at the edge
        elif ((seconds % 20 == 0)); then
            echo "$line"
        fi
    done
}

install() { # by_uv or by_pip; shows the end of its output if it fails
    local status=0
    : >"$scratch/log"
    show_progress &
    ticker=$!
    "$1" >"$scratch/log" 2>&1 || status=$?
    kill "$ticker"
    wait "$ticker" 2>/dev/null || true
    ticker=
    [[ ! -t 1 ]] || printf '\r\033[K'
    ((status == 0)) || tail -n 25 "$scratch/log" >&2
    return "$status"
}

echo "[4/4] Installing $project with the versions of constraints.txt."
if ! uv=$(find_uv .venv/bin/python); then
    echo "[4/4] uv cannot be had; pip takes several minutes."
    uv=
elif ! install by_uv; then
    echo "[4/4] uv failed (its error is above); pip takes several minutes."
    uv=
fi
[[ -n $uv ]] || install by_pip ||
    fail "pip could not install $project (its error is above)" "check the network and the disk space, then try again"
echo "$stamp" >.venv/zero-stamp
echo "Ready: .venv/bin/python main_zero.py"
