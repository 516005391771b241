"""Every test runs on eight virtual CPU devices, without a network, and any warning is an error (pyproject.toml)."""

import ctypes
import functools
import gc
import mmap
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

import tests.helpers.bytecode  # noqa: F401 -- before jax is imported

if TYPE_CHECKING:
    from tests.helpers import cli

# Before jax is imported for the first time.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"  # of programs that tests start
os.environ["TPU_SKIP_MDS_QUERY"] = (
    "1"  # libtpu, which only compiles here, would ask a metadata server that is not there
)
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # else a second process that compiles for TPU aborts
os.environ["WANDB_MODE"] = "offline"
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"  # a seventh of a compilation handles the places of operations
os.environ["OPENBLAS_NUM_THREADS"] = "1"  # its idle threads spin
os.environ["OMP_NUM_THREADS"] = "1"  # as do those of PyTorch, whose tests take five times as long with two

import jax
from hypothesis import HealthCheck, settings

import zero
import zero.run.features  # declares the keys of features
from tests.helpers.compilation import QUICK_FLAGS

gc.set_threshold(100_000, 20, 20)  # a fifth of the time of a trace goes into passes over what has been imported
zero.use_cpu_devices(8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_enable_compilation_cache", False)  # a command that a test calls would use the user's
settings.register_profile("random", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", settings.get_profile("random"), derandomize=True)
settings.load_profile("same")  # before modules are imported, whose tests keep the settings of that moment


QUICK = "quick"  # a marker (CONTRIBUTING.md)
MODULES = Path(zero.__file__).parent


# MiB of a process, with the pages of libraries: 210, with libtpu 350, with PyTorch 290.
MOST_MEMORY = 1250  # modules are a third, or two thirds with PyTorch; with less, tests of a file compile programs again
MEMORY_BETWEEN_FILES = 600  # a file's programs are of little use to the next one
GROWTH = 50  # over what was left
MOST_ARENAS = 2  # of the C library, which otherwise keeps what each of dozens of threads has freed apart
M_ARENA_MAX = -8  # its name in malloc.h
COMPILED = "ZERO_TESTS_COMPILED"  # as in tests/helpers/cli.py, which is imported where a test starts runs
LEFT = pytest.StashKey[int]()
TREES = "tests.helpers.rooms"  # which holds the syntax trees of all sources: 60 MiB, or 190 with those of the tests


class Everywhere:
    """A plugin for tests and for the examples of modules outside tests/, which hooks of this file do not see."""

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """Leaves out modules without an example: --doctest-modules would import them, and PyTorch with one of them."""
        is_module = collection_path.suffix == ".py" and collection_path.is_relative_to(MODULES)
        return True if is_module and ">>>" not in collection_path.read_text() else None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Leaves out most of XLA's optimizations: programs compile in a fifth of the time.

        `-m slow` compiles as users do, and so do tests marked `optimized`, which compare compiled programs with single
        operations bit by bit.
        """
        is_quick = item.get_closest_marker("optimized") is None and item.config.getoption("-m") != "slow"
        if is_quick != jax.config.values["jax_disable_most_optimizations"]:
            jax.clear_caches()  # single operations too are compiled in one of two ways
            jax.config.update("jax_disable_most_optimizations", is_quick)

    @pytest.hookimpl(trylast=True)  # after fixtures have ended, which hold arrays and programs
    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        """Drops compiled programs where they have made the process large, so that three workers fit beside others.

        Where dropping them does not suffice, it is repeated only after further growth: shared programs are compiled
        again.
        """
        is_last_of_file = nextitem is None or nextitem.path != item.path
        if is_last_of_file and isinstance(item, pytest.Function):
            forget_results(item.module)
        left = item.session.stash.get(LEFT, 0)
        if is_last_of_file:
            limit = max(MEMORY_BETWEEN_FILES, left + GROWTH)
        else:
            limit = max(MOST_MEMORY, left + GROWTH)
        if resident_memory() > limit:
            jax.clear_caches()
            gc.collect()
            with suppress(OSError, AttributeError):  # only glibc has it
                ctypes.CDLL(None).malloc_trim(0)
            item.session.stash[LEFT] = resident_memory()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[None]:
    """A run in this process sets options of compilers for its own; other tests start theirs without them."""
    before = os.environ.get("LIBTPU_INIT_ARGS")
    result = yield
    if before is None:
        os.environ.pop("LIBTPU_INIT_ARGS", None)
    else:
        os.environ["LIBTPU_INIT_ARGS"] = before
    return result


@pytest.hookimpl(tryfirst=True)  # before hypothesis reads its seed
def pytest_configure(config: pytest.Config) -> None:
    """Has XLA generate code in the older way, which takes half the time; `-m slow` compiles as users do.

    Memory that is freed can be given back, and runs that tests start have one cache of programs.

    `-m quick` leaves out the doctests, whose modules would all be imported. Hypothesis draws the same cases each time,
    so that a user's tests do not fail where those of CI passed; `-m slow` draws others and prints their seed.
    """
    if config.getoption("-m") == QUICK and config.args_source is config.ArgsSource.TESTPATHS:
        config.args = [str(Path(__file__).parent)]
    with suppress(OSError, AttributeError):  # only glibc has it
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, MOST_ARENAS)
    if config.getoption("-m") == "slow":
        settings.load_profile("random")
        if config.option.hypothesis_seed is None:  # workers get the options of the process that starts them
            config.option.hypothesis_seed = str(secrets.randbits(32))
    else:
        os.environ["XLA_FLAGS"] += f" {QUICK_FLAGS}"
    config.pluginmanager.register(Everywhere())
    if "PYTEST_XDIST_WORKER" not in os.environ:  # workers, which are started later, find it
        os.environ[COMPILED] = tempfile.mkdtemp(prefix="zero-tests-compiled-")


def pytest_report_header(config: pytest.Config) -> str | None:
    seed = config.option.hypothesis_seed
    return None if seed is None else f"--hypothesis-seed={seed} draws the same cases again"


def pytest_unconfigure() -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ and COMPILED in os.environ:
        shutil.rmtree(os.environ.pop(COMPILED), ignore_errors=True)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Files with PyTorch, which fills 400 MiB, run on one worker, those with libtpu, which fills 200, on one.

    So do those with runs in the lasting process, which share what is compiled. None leaves the choice to pytest-xdist.
    """
    if config.getoption("dist") != "loadfile":
        return None
    from tests.helpers.workers import HeldOnce

    return HeldOnce(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files of the worker with PyTorch come first, as that worker takes no others; those with libtpu come last."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        from tests.helpers.workers import turn

        items.sort(key=lambda item: turn(item.nodeid))


def pytest_collection_finish() -> None:
    """What has been imported is no garbage."""
    if "hypothesis" in sys.modules:  # an import of half a second
        from hypothesis import settings

        settings.register_profile("busy", deadline=None)
        settings.load_profile("busy")  # an example that a busy machine delays is no failure
    gc.freeze()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out programs that tests start: --doctest-modules would import them.

    `-m quick` imports only modules with a test that is marked so.
    """
    if collection_path.suffix != ".py":
        return None
    is_test = collection_path.name.startswith("test_")
    if is_test and config.getoption("-m") == QUICK:
        is_test = f"pytest.mark.{QUICK}" in collection_path.read_text()
    return None if is_test else True


def forget_results(module: ModuleType) -> None:
    """Empties the caches of the functions of a file of tests, which no other file calls, and of syntax trees."""
    for function in vars(module).values():
        if isinstance(function, functools._lru_cache_wrapper) and function.__module__ in (module.__name__, TREES):
            function.cache_clear()


def resident_memory() -> int:
    """MiB of this process; 0 where the system does not tell."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return 0
    return int(statm.read_text().split()[1]) * mmap.PAGESIZE >> 20


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """The address of a storage server on loopback (tests/helpers/bucket.py)."""
    from tests.helpers import bucket

    with bucket.serving() as address:
        yield address


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The address of a server of S3's protocol on loopback (tests/helpers/s3.py)."""
    from tests.helpers import s3

    with s3.serving() as address:
        yield address


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """An empty disk of 128 KiB, to be filled (tests/helpers/disks.py)."""
    from tests.helpers import disks

    place = tmp_path / "disk"
    place.mkdir()
    with disks.small_disk(place):
        yield place


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a small corpus, to start runs in; a module that needs more in it overrides this fixture."""
    from tests.helpers import cli

    return cli.make_workplace(tmp_path_factory.mktemp("workplace"))


@pytest.fixture(scope="module")
def lasting(workplace: Path) -> "cli.Lasting":
    """Runs in the workplace of the module that share their programs with those of other modules."""
    from tests.helpers import cli

    return cli.Lasting(workplace)


@pytest.fixture(scope="module")
def forks(workplace: Path) -> "cli.Forks":
    """Short runs in the workplace of the module."""
    from tests.helpers import cli

    return cli.Forks(workplace)
