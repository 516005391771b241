"""The wheel: what is in it, what it depends on, and that it works in an environment and a directory of its own."""

import email
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import time
import tomllib
import venv
import zipfile
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, metadata, packages_distributions, version
from pathlib import Path

import pytest
from packaging.metadata import Metadata
from packaging.specifiers import SpecifierSet

from tests.helpers.rooms import SOURCES, WITHOUT_JAX, imports, nodes, room
from tests.helpers.without_jax import LIBRARIES, use_corpus

REPOSITORY = Path(__file__).parent.parent
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
SCRIPTS = PROJECT["scripts"]
EXTRAS = PROJECT["optional-dependencies"]
ON_CPU = {"JAX_PLATFORMS": "cpu", "WANDB_MODE": "offline", "HOME": os.environ["HOME"], "PATH": os.environ["PATH"]}
# The three lines of the README on eight devices, with nothing but what the wheel itself brings.
SHARDED_ADAMW = """
import importlib.util, jax, optax, zero
jax.config.update("jax_num_cpu_devices", 8)
tx = zero.shard_optimizer(optax.adamw(1e-3), axis_name="batch")
state = jax.pmap(tx.init, axis_name="batch")({"w": jax.numpy.ones((8, 16, 3))})
assert any(leaf.shape == (8, 2, 3) for leaf in jax.tree.leaves(state)), jax.tree.map(lambda leaf: leaf.shape, state)
unexpected = [name for name in ("flax", "hydra", "orbax", "wandb", "matplotlib") if importlib.util.find_spec(name)]
assert unexpected == [], unexpected
"""


@pytest.fixture(scope="module", autouse=True)
def parsed() -> Iterator[None]:
    """What was parsed, 80 MiB, is kept for these tests alone."""
    yield
    nodes.cache_clear()


def pip(python: Path | str, *arguments: object) -> None:
    command = [sys.executable, "-m", "pip", "--python", str(python), *map(str, arguments), "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def run(place: Path, program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([program, *arguments], cwd=place, env=ON_CPU, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done


OLDEST_PYTHON = "3.11.0"
PINS = dict(re.findall(r"^([\w.-]+)==(\S+)", (REPOSITORY / "constraints.txt").read_text(), re.M))


def installed_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


INSTALLED = {name for name in PINS if installed_version(name) == PINS[name]}


def test_pins_install_on_the_oldest_python() -> None:
    """Of the pins that this environment has, each says so itself."""
    refusals = {}
    for name in INSTALLED:
        own = metadata(name)
        if "Requires-Python" in own and not SpecifierSet(own["Requires-Python"]).contains(OLDEST_PYTHON):
            refusals[name] = own["Requires-Python"]
    assert len(INSTALLED) > 100 and refusals == {}


@pytest.mark.slow
def test_other_pins_install_on_the_oldest_python(tmp_path: Path) -> None:
    """Of the other pins, those of the extra docs among them, the package index says so."""
    names = [f"{name}=={PINS[name]}" for name in PINS.keys() - INSTALLED]
    options = ("--dry-run", "--no-deps", "--only-binary=:all:", "--target", tmp_path, "--python-version", OLDEST_PYTHON)
    pip(sys.executable, "install", *options, *names)


PAGES = [
    "zero/pages/parts/*",
    "zero/costs/page/*",
    "zero/report/page/*",
    "zero/planning/*.jinja",
    "zero/corpus/preparing/page/*",
]
SDIST = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built without a network from a copy, because setuptools writes beside the sources."""
    place = tmp_path_factory.mktemp("sdist")
    for name in ("CITATION.cff", "LICENSE", "README.md", "pyproject.toml"):
        shutil.copy(REPOSITORY / name, place)
    for name in ("conf", "zero"):
        shutil.copytree(REPOSITORY / name, place / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    run(place, Path(sys.executable), "-c", SDIST, str(place))
    (sdist,) = place.glob("zero_pmap-*.tar.gz")
    return sdist


@pytest.fixture(scope="module")
def wheel(sdist: Path) -> Path:
    """Built from the sdist, as installers without the wheel do."""
    place = sdist.parent / "wheel"
    pip(sys.executable, "wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", place, sdist)
    (wheel,) = place.glob("zero_pmap-*-py3-none-any.whl")
    return wheel


@pytest.mark.wide
def test_metadata_is_fit_to_publish(sdist: Path, wheel: Path) -> None:
    """By the validation of the packaging library, as package indices apply it; CI asks twine as well."""
    with tarfile.open(sdist) as archive:
        (name,) = [name for name in archive.getnames() if re.fullmatch(r"[^/]+/PKG-INFO", name)]
        info = archive.extractfile(name)
        assert info is not None
        of_sdist = Metadata.from_email(info.read(), validate=True)
    (path,) = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".dist-info/METADATA")]
    of_wheel = Metadata.from_email(zipfile.ZipFile(wheel).read(path), validate=True)
    for found in (of_sdist, of_wheel):
        assert (found.name, str(found.version)) == ("zero-pmap", PROJECT["version"])
        assert found.description_content_type == "text/markdown" and found.description
        assert found.license_expression == "Apache-2.0" and str(found.requires_python) == ">=3.11"


@pytest.mark.wide
def test_wheel_contents(wheel: Path) -> None:
    """The wheel contains the package and its configuration."""
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    sources = {path.relative_to(REPOSITORY) for path in REPOSITORY.glob("zero/**/*.py")}
    conf = {Path("zero") / path.relative_to(REPOSITORY) for path in REPOSITORY.glob("conf/**/*.yaml")}
    assert Path("zero/conf/preset/v3-32.yaml") in conf
    pages = {path.relative_to(REPOSITORY) for pattern in PAGES for path in REPOSITORY.glob(pattern)}
    templates = ("report/page/report", "planning/plan", "costs/page/plan", "corpus/preparing/page/corpus")
    assert {Path(f"zero/{template}.html.jinja") for template in templates} <= pages
    others = {Path("zero/py.typed"), Path("zero/conf/help.json")}
    assert names == {path.as_posix() for path in sources | conf | pages | others}


@pytest.mark.wide
def test_dependencies(wheel: Path) -> None:
    """Primitives depend on three packages, and the rest are extras."""
    (path,) = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".dist-info/METADATA")]
    metadata = email.message_from_bytes(zipfile.ZipFile(wheel).read(path))
    required = metadata.get_all("Requires-Dist", [])
    plain = {re.split(r"[^\w-]", requirement)[0] for requirement in required if "extra ==" not in requirement}
    assert plain == {"jax", "numpy", "optax"}
    extras = {
        "flax",
        "corpus",
        "train",
        "plan",
        "tpu",
        "cuda12",
        "cuda13",
        "hub",
        "s3",
        "azure",
        "parquet",
        "grain",
        "beam",
        "near-duplicates",
        "sentencepiece",
        "huggingface",
        "lm-eval",
        "tensorboard",
        "docs",
        "test",
    }
    assert {*metadata.get_all("Provides-Extra", [])} == extras
    prepare = (REPOSITORY / "prepareTPUVM.sh").read_text()
    assert {*re.findall(r"extras\+?=\((\w+)\)", prepare)} == {"train", "plan", "parquet", "tpu", "cuda12", "test"}


def test_requirements_without_jax() -> None:
    """data/requirements.txt has what the extra `corpus` brings, and of what zero itself requires only numpy."""
    lines = (REPOSITORY / "data/requirements.txt").read_text().splitlines()
    numpy = [requirement for requirement in PROJECT["dependencies"] if requirement.startswith("numpy")]
    expected = [*EXTRAS["corpus"], *numpy]
    assert [line for line in lines if not line.startswith("#")] == sorted(expected)


def undeclared(modules: Iterable[str], requirements: Iterable[str]) -> list[str]:
    """The libraries outside of Python's own that modules import, and that no requirement names."""
    declared = {re.split(r"[^\w-]", requirement)[0].lower().replace("_", "-") for requirement in requirements}
    distributions = packages_distributions()
    found = []
    for module in modules:
        names = {name.partition(".")[0] for name in imports(module, SOURCES[module].read_text())}
        for library in names - sys.stdlib_module_names - {"zero"}:
            if not declared & {name.lower().replace("_", "-") for name in distributions.get(library, [library])}:
                found.append(f"{module} imports {library}")
    return found


def test_every_imported_library_is_declared() -> None:
    """By itself: what another library happens to bring today may be gone with its next version."""
    extras = [requirement for name, one in EXTRAS.items() if name != "test" for requirement in one]
    assert undeclared([name for name in SOURCES if name.startswith("zero")], [*PROJECT["dependencies"], *extras]) == []


@pytest.mark.parametrize("program", [("mine.py",), ("-c", "import zero; print(zero.__file__)")], ids=["script", "-c"])
def test_import_beside_a_clone(program: tuple[str, ...], tmp_path: Path) -> None:
    """The folder of a clone that is named zero is not taken for the package, by a script or a notebook beside it."""
    (tmp_path / "zero").symlink_to(REPOSITORY)
    (tmp_path / "mine.py").write_text("import zero; print(zero.__file__)")
    imported = run(tmp_path, Path(sys.executable), *program).stdout.strip()
    assert imported.endswith("/zero/__init__.py"), imported


def test_corpus_imports_what_its_extras_bring() -> None:
    adapters = "zero.corpus.adapters."  # each stands on a library that whoever imports it has
    modules = [name for name in SOURCES if room(name) in WITHOUT_JAX and not name.startswith(adapters)]
    extras = ("corpus", "hub", "s3", "azure", "parquet", "sentencepiece", "beam", "near-duplicates")
    assert len(modules) > 50
    assert undeclared(modules, ["numpy", *(requirement for name in extras for requirement in EXTRAS[name])]) == []


@pytest.mark.wide  # the tests above have what is in the wheel
def test_installed_commands_work_from_another_directory(wheel: Path, tmp_path: Path) -> None:
    """In an environment that borrows all libraries from the one of the tests, but not its zero."""
    venv.create(tmp_path / "venv", symlinks=True)
    programs = tmp_path / "venv" / "bin"
    pip(programs / "python", "install", "--no-deps", "--no-index", wheel)
    (site_packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    # The .pth files there, such as that of an editable zero, are not read.
    (site_packages / "libraries.pth").write_text(sysconfig.get_path("purelib"))
    place = tmp_path / "elsewhere"
    place.mkdir()

    code = """if True:
        import importlib, json, sys, zero
        targets = [target.split(":") for target in json.loads(sys.argv[1])]
        assert all(callable(getattr(importlib.import_module(module), name)) for module, name in targets)
        print(zero.__file__)
    """
    done = run(place, programs / "python", "-c", code, json.dumps([*SCRIPTS.values()]))
    assert Path(done.stdout.strip()).is_relative_to(site_packages)
    assert {path.name for path in programs.glob("zero-*")} == {*SCRIPTS}

    done = run(place, programs / "zero-train", "--cfg", "job", "+preset=v3-32", "model.override.N=3")
    assert "'N': 3" in done.stdout and "mode: train" in done.stdout and "size: 1_1b" in done.stdout
    assert "mode: plan" in run(place, programs / "zero-plan", "--cfg", "job").stdout
    assert [*place.iterdir()] == []

    (place / "jax.py").write_text("import pathlib, time; pathlib.Path('reached').touch(); time.sleep(60)")
    environment = ON_CPU | {"PYTHONPATH": str(place)}
    process = subprocess.Popen([programs / "zero-train"], cwd=place, env=environment, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not (place / "reached").exists():  # its modules are being imported
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=900)[1] == "error: interrupted\n"
    assert process.returncode == 128 + signal.SIGINT


@pytest.mark.slow  # installs from the package index
def test_wheel_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", symlinks=True)
    programs = tmp_path / "venv" / "bin"
    place = tmp_path / "elsewhere"
    place.mkdir()
    pip(programs / "python", "install", "-c", REPOSITORY / "constraints.txt", wheel)
    run(place, programs / "python", "-c", SHARDED_ADAMW)

    pip(programs / "python", "install", "-c", REPOSITORY / "constraints.txt", f"{wheel}[train]")
    steps = ("training.total_steps=4", "training.warmup_steps=1", "training.staged_warmup_steps=0")
    done = run(place, programs / "zero-train", *steps, "training.evaluation_frequency=4", "training.sample_tokens=8")
    assert {path.name for path in place.iterdir()} == {"data", "runs"}
    assert (place / "data/index/stdlib_train.index").exists() and [*(place / "data/corpus").iterdir()]
    (metrics,) = (place / "runs").glob("*/*/metrics.jsonl")
    assert json.loads(metrics.read_text().splitlines()[-1])["step"] == 4, done.stderr
    done = run(place, programs / "zero-report", str(metrics.parent))
    assert Path(done.stdout.strip()).exists()


@pytest.mark.slow  # installs from the package index
def test_corpus_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    """By the two commands of data/README.md: nothing of jax is there, and a corpus is prepared, verified and read."""
    venv.create(tmp_path / "venv", symlinks=True)
    programs = tmp_path / "venv" / "bin"
    constraints, requirements = REPOSITORY / "constraints.txt", REPOSITORY / "data/requirements.txt"
    pip(programs / "python", "install", "-c", constraints, "-r", requirements)
    pip(programs / "python", "install", "--no-deps", wheel)
    place = tmp_path / "elsewhere"
    place.mkdir()
    code = f"import importlib.util; print(*filter(importlib.util.find_spec, {LIBRARIES}))"
    assert run(place, programs / "python", "-c", code).stdout.split() == []
    use_corpus(place, programs / "python", [programs / "zero-prepare"], ON_CPU)
