"""prepareTPUVM.sh with real venv and pip, on a project without dependencies, so that no network is needed.

A stand-in for uv installs by pip.
"""

import os
import pty
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
"""
BACKEND = '''
"""As little as pip accepts for `pip install -e .[extras]`."""
import zipfile

def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    info, name = "zero_pmap-0.1.0.dist-info/", "zero_pmap-0.1.0-py3-none-any.whl"
    extras = "".join(f"Provides-Extra: {extra}\\n" for extra in ("train", "plan", "tpu", "cuda12", "test"))
    with zipfile.ZipFile(f"{wheel_directory}/{name}", "w") as wheel:
        wheel.writestr(info + "METADATA", "Metadata-Version: 2.1\\nName: zero-pmap\\nVersion: 0.1.0\\n" + extras)
        wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(info + "RECORD", "")
    return name
'''
TOOLS = ["bash", "cat", "cksum", "dirname", "env", "grep", "mktemp", "rm", "sleep", "tail", "uname"]
UV = """
printf '%s\\n' "$@" "SSL_CERT_FILE=${SSL_CERT_FILE:-}" >"$HOME/uv arguments"
exec env -u PIP_CONFIG_FILE .venv/bin/python -m pip --isolated install --no-index --disable-pip-version-check "${@: -4}"
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A directory with a blank in its name that holds the script and a project without dependencies."""
    directory = tmp_path / "a clone"
    directory.mkdir()
    shutil.copy(REPOSITORY / "prepareTPUVM.sh", directory)
    (directory / "pyproject.toml").write_text(PYPROJECT)
    (directory / "backend.py").write_text(BACKEND)
    (directory / "constraints.txt").write_text("jax==0.10.2\n")
    return directory


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A directory for PATH with the tools that the script needs, uv among them: no apt-get, nvidia-smi and Python."""
    directory = tmp_path / "bin"
    directory.mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found
        (directory / tool).symlink_to(found)
    add_program(directory, "uv", UV)
    return directory


def add_program(programs: Path, name: str, script: str) -> None:
    (programs / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
    (programs / name).chmod(0o755)


def prepare(checkout: Path, programs: Path, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Calls the script by its absolute path from another directory, with little more than HOME and PATH."""
    return subprocess.run(
        [str(checkout / "prepareTPUVM.sh"), *options],
        cwd="/",
        env={"HOME": str(programs.parent), "PATH": str(programs), "PIP_NO_INDEX": "1", **variables},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def made_environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("made") / ".venv"
    subprocess.run([os.path.realpath(sys.executable), "-m", "venv", directory], check=True)
    return directory


@pytest.fixture
def with_environment(checkout: Path, made_environment: Path) -> Path:
    """The checkout with a .venv, as after an interrupted set-up."""
    shutil.copytree(made_environment, checkout / ".venv", symlinks=True)
    return checkout


def add_python(programs: Path) -> None:
    add_program(programs, "python3", f'exec {os.path.realpath(sys.executable)} "$@"')


@pytest.mark.wide  # the tests of the installers and of plans have its steps
def test_setup_runs_once(checkout: Path, programs: Path) -> None:
    """The script sets up once, and again only after a change."""
    add_program(programs, "python3.11", "echo 'pyenv: python3.11: command not found' >&2; exit 127")
    add_python(programs)

    first = prepare(checkout, programs)
    assert first.returncode == 0, first.stderr
    steps = [line[:5] for line in first.stdout.splitlines()]
    assert steps == ["[1/4]", "[2/4]", "[3/4]", "[4/4]", "Ready"]
    assert f"{programs}/python3 (Python 3." in first.stdout
    assert (checkout / ".venv/bin/python").exists()

    second = prepare(checkout, programs)
    assert second.stdout.splitlines()[1:] == ["[4/4] .venv is up to date."]

    (programs / "python3").unlink()  # from here on .venv's own is enough
    (checkout / "constraints.txt").write_text("jax==0.10.3\n")
    changed = prepare(checkout, programs, "--test")
    assert "[3/4] .venv exists." in changed.stdout and ".[train,test]" in changed.stdout and "Ready" in changed.stdout

    moved = checkout.rename(checkout.parent / "moved")
    assert "Ready" in prepare(moved, programs, "--test").stdout  # an editable install contains its path
    assert "up to date" in prepare(moved, programs, "--test").stdout

    (moved / "constraints.txt").write_text("zero-pmap==7\n")
    failed = prepare(moved, programs, "--test")
    assert failed.returncode == 1 and "pip could not install" in failed.stderr and "remedy:" in failed.stderr
    (moved / "constraints.txt").write_text("jax==0.10.3\n")
    assert "Ready" in prepare(moved, programs, "--test").stdout  # a failed call leaves no stamp


@pytest.mark.wide
def test_uv_has_the_settings_of_pip(with_environment: Path, programs: Path, tmp_path: Path) -> None:
    """Where pip is told where packages are, uv is told as well; what is set in two places is told once."""
    settings = "cert=/certificates\nconstraint=/a.txt\n /b.txt\nindex-url=file:///lost\nfind-links=/lost\n"
    (tmp_path / "pip.conf").write_text(f"[global]\n{settings}[install]\nindex-url=file:///index\n")
    variables = {"PIP_CONFIG_FILE": str(tmp_path / "pip.conf"), "PIP_FIND_LINKS": "/wheels /more", "PIP_TIMEOUT": "9"}
    done = prepare(with_environment, programs, "--test", **variables)
    assert done.returncode == 0, done.stderr
    *words, certificates = (programs.parent / "uv arguments").read_text().splitlines()
    assert certificates == "SSL_CERT_FILE=/certificates" and words.count("--index-url") == 1
    assert words[-4:] == ["-c", "constraints.txt", "-e", ".[train,test]"]
    told = " ".join(words[:-4])
    assert told.startswith("pip install --python .venv/bin/python --index-strategy unsafe-best-match ")
    for option in (
        *("--constraint /a.txt --constraint /b.txt", "--find-links /wheels --find-links /more"),
        *("--index-url file:///index", "--no-index"),
    ):
        assert f" {option} " in f"{told} "
    assert "/lost" not in told and "9" not in words


@pytest.mark.wide
def test_pip_has_a_setting_that_uv_lacks(with_environment: Path, programs: Path) -> None:
    """pip installs, which is told: what uv would install may be another package."""
    done = prepare(with_environment, programs, PIP_PREFER_BINARY="1")
    assert done.returncode == 0, done.stderr
    assert "uv has no equivalent of pip's setting prefer-binary" in done.stderr and "pip takes several" in done.stdout
    assert not (programs.parent / "uv arguments").exists()


@pytest.mark.wide  # the README's command has a real environment made before
@pytest.mark.parametrize(
    "uv",
    [None, "echo no such package >&2; exit 1"],
    ids=["no uv", "uv fails"],
)
def test_pip_installs_without_uv(with_environment: Path, programs: Path, uv: str | None) -> None:
    (programs / "uv").unlink()
    if uv is not None:
        add_program(programs, "uv", uv)
    done = prepare(with_environment, programs)
    assert done.returncode == 0, done.stderr
    assert ("uv cannot be had" if uv is None else "uv failed") in done.stdout and "Ready" in done.stdout
    assert ("no such package" in done.stderr) == (uv is not None)
    imported = subprocess.run([with_environment / ".venv/bin/python", "-m", "pip", "show", "-q", "zero-pmap"])
    assert imported.returncode == 0


@pytest.mark.wide
def test_uv_is_fetched_for_the_call(with_environment: Path, programs: Path, tmp_path: Path) -> None:
    """Of the version in constraints.txt; nothing of it stays."""
    (programs / "uv").unlink()
    for version in ("8", "9"):
        with zipfile.ZipFile(tmp_path / f"uv-{version}-py3-none-any.whl", "w") as wheel:
            info = f"uv-{version}.dist-info/"
            wheel.writestr(info + "METADATA", f"Metadata-Version: 2.1\nName: uv\nVersion: {version}\n")
            wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(info + "RECORD", "")
            script = f'#!/usr/bin/env bash\necho {version} >>"$HOME/version"\n{UV}'
            program = zipfile.ZipInfo(f"uv-{version}.data/scripts/uv")
            program.external_attr = 0o100755 << 16
            wheel.writestr(program, script)
    (with_environment / "constraints.txt").write_text("uv==8\n")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    done = prepare(with_environment, programs, PIP_FIND_LINKS=str(tmp_path), TMPDIR=str(temporary))
    assert done.returncode == 0, done.stderr
    assert "pip takes" not in done.stdout, done.stdout + done.stderr
    assert (programs.parent / "version").read_text() == "8\n"
    assert not list(temporary.iterdir()) and not list((with_environment / ".venv").glob("**/uv*"))


@pytest.mark.wide
def test_progress_on_a_terminal(with_environment: Path, programs: Path) -> None:
    """The seconds and the last line of the installer, in one line that is removed at the end."""
    add_program(programs, "uv", "echo Resolved 203 packages; sleep 3\n" + UV)
    reader, writer = pty.openpty()
    environment = {"HOME": str(programs.parent), "PATH": str(programs), "PIP_NO_INDEX": "1"}
    script = subprocess.Popen([with_environment / "prepareTPUVM.sh"], env=environment, stdout=writer, stderr=writer)
    os.close(writer)
    shown = b""
    try:
        while block := os.read(reader, 4096):
            shown += block
    except OSError:  # Linux ends a terminal that nobody writes to any more with EIO
        pass
    os.close(reader)
    assert script.wait(900) == 0, shown
    assert re.search(r"\r\x1b\[\?7l\x1b\[K\[4/4\] \d+ s: Resolved 203 packages\x1b\[\?7h\r", shown.decode())
    assert "\r\x1b[KReady" in shown.decode() and "Terminated" not in shown.decode()


def test_names_a_missing_python(checkout: Path, programs: Path) -> None:
    add_program(programs, "python3", '[[ $1 == --version ]] && echo "Python 3.10.12"')
    done = prepare(checkout, programs)
    assert done.returncode == 1
    assert "Python 3.10.12" in done.stdout
    assert "could not install Python 3.11 or newer" in done.stderr and "remedy:" in done.stderr
    assert not (checkout / ".venv").exists()


def test_refuses_an_unknown_option(checkout: Path, programs: Path) -> None:
    done = prepare(checkout, programs, "--tests")
    assert done.returncode == 1 and "--tests" in done.stderr


def test_plan_adds_the_tpu_compiler(checkout: Path, programs: Path) -> None:
    """The option for plans adds the TPU compiler, and later calls keep it."""
    site_packages = checkout / ".venv/lib/python3.11/site-packages"
    for directory in (checkout / ".venv/bin", site_packages):
        directory.mkdir(parents=True)
    add_program(checkout / ".venv/bin", "python", "")  # installs nothing, successfully
    assert ".[train] " in prepare(checkout, programs).stdout
    assert ".[train,plan] " in prepare(checkout, programs, "--plan").stdout
    (site_packages / "libtpu").mkdir()  # as the extra would
    for options in (["--plan"], []):
        assert "up to date" in prepare(checkout, programs, *options).stdout
    assert ".[train,test] " in prepare(checkout, programs, "--plan", "--test").stdout
    (checkout / ".venv/bin/pytest").touch()
    for options in (["--plan"], ["--test"], []):
        assert "up to date" in prepare(checkout, programs, *options).stdout


def test_parquet(checkout: Path, programs: Path) -> None:
    """The option adds the extra, and later calls keep it."""
    packages = checkout / ".venv/lib/python3.11/site-packages"
    for directory in (checkout / ".venv/bin", packages):
        directory.mkdir(parents=True)
    add_program(checkout / ".venv/bin", "python", "")  # installs nothing, successfully
    assert ".[train,parquet] " in prepare(checkout, programs, "--parquet").stdout
    (packages / "pyarrow").mkdir()
    assert "up to date" in prepare(checkout, programs).stdout


def test_a_tpu_without_its_driver(checkout: Path, programs: Path, tmp_path: Path) -> None:
    """It is named with its remedy, unless the CPU is asked for; Google's network cards are no TPUs."""
    script = checkout / "prepareTPUVM.sh"
    script.write_text(script.read_text().replace("/sys/bus/pci/devices", str(tmp_path / "pci")))
    for address in ("0", "1"):
        (tmp_path / "pci" / address).mkdir(parents=True)
        (tmp_path / "pci" / address / "vendor").write_text("0x1ae0\n")
        (tmp_path / "pci" / address / "device").write_text("0x0042\n")
    assert "no /dev/accel*" not in prepare(checkout, programs).stderr
    (tmp_path / "pci" / "1" / "device").write_text("0x0063\n")
    refused = prepare(checkout, programs)
    assert refused.returncode == 1 and "no /dev/accel*" in refused.stderr and "remedy: in a container" in refused.stderr
    assert "without accelerator" in prepare(checkout, programs, JAX_PLATFORMS="cpu").stdout


def test_plan_without_tpu_compiler(checkout: Path, programs: Path) -> None:
    """The option for plans is refused where there is no TPU compiler."""
    (programs / "uname").unlink()
    add_program(programs, "uname", "echo Darwin arm64")
    done = prepare(checkout, programs, "--plan")
    assert done.returncode == 1 and "Darwin arm64" in done.stderr and "remedy:" in done.stderr


def test_sees_a_gpu(checkout: Path, programs: Path) -> None:
    add_program(programs, "nvidia-smi", 'echo "GPU 0: NVIDIA H200 (UUID: GPU-0)"')
    assert "an NVIDIA host" in prepare(checkout, programs).stdout


@pytest.mark.parametrize("script", ["prepareTPUVM.sh", ".ci/run"])
def test_shellcheck_finds_nothing(script: str) -> None:
    shellcheck = Path(sys.executable).parent / "shellcheck"
    done = subprocess.run([shellcheck, REPOSITORY / script], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_ci_runs_the_documented_command() -> None:
    """CI calls the test command of the README."""
    main, test = re.findall(r"^```\w*\n(.*?)\n```$", (REPOSITORY / "README.md").read_text(), re.DOTALL | re.MULTILINE)[
        :2
    ]
    assert main == "./prepareTPUVM.sh && .venv/bin/python main_zero.py"
    assert test == "./prepareTPUVM.sh --test && .venv/bin/python -m pytest"
    assert test in (REPOSITORY / ".ci/run").read_text()
