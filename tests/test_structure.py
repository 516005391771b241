"""The rooms of the house: who imports whom, what a plain `import zero` loads, and what is never used at all."""

import ast
import doctest
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import zero
from docs import draw_rooms
from tests.helpers.public_names import FUNCTIONS, MODULES, TYPES
from tests.helpers.rooms import LIBRARY, REPOSITORY, ROOMS, SOURCES, WITHOUT_JAX, arrows, imports, nodes, room

pytestmark = pytest.mark.quick

ARRAYS = {"jax", "flax", "optax", "numpy"}
# What a file of LIBRARY may take from the standard library: nothing that touches files, networks or processes.
PURE = {
    "__future__",
    "abc",
    "collections",
    "contextlib",
    "contextvars",
    "copy",
    "dataclasses",
    "enum",
    "functools",
    "inspect",
}
PURE |= {"itertools", "math", "operator", "re", "sys", "types", "typing", "warnings"}
SETS_ENVIRONMENT = {"zero.partition.virtual_devices"}  # which XLA reads once, when jax starts its devices
IMPORTS_BY_NAME = {"zero"}  # when a name is first used
# Neither imports the other. A run is handed the function that prepares a missing corpus.
UNRELATED = [("zero.partition", "zero.models"), ("zero.run", "zero.planning"), ("zero.run", "zero.corpus.preparing")]
UNRELATED += [("zero.training", "zero.hosts"), ("zero.training", "zero.costs")]
# The interface of groups that models call, which imports nothing of zero; what a run is told, and a plan of it as well.
BETWEEN = {"zero.partition.model_parallel", "zero.run.config"}
UNPICKLERS = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}


@pytest.fixture(scope="module", autouse=True)
def parsed() -> Iterator[None]:
    """What was parsed, 80 MiB, is kept for these tests alone."""
    yield
    nodes.cache_clear()


def are_unrelated(module: str, imported: str) -> bool:
    """Whether one of two modules is in a package that is unrelated to the other's."""

    def is_in(name: str, package: str) -> bool:
        return f"{name}.".startswith(f"{package}.")

    return any(
        (is_in(module, one) and is_in(imported, other)) or (is_in(module, other) and is_in(imported, one))
        for one, other in UNRELATED
    )


def import_violations(module: str, source: str) -> list[str]:
    """What a file imports and must not: from a higher room, from an unrelated one, or from outside."""
    here = room(module)
    violations = []
    for name in imports(module, source):
        top = name.partition(".")[0]
        if name in SOURCES:
            there = room(name)
            is_unrelated = are_unrelated(module, name) and name not in BETWEEN
            reexports = name == "zero" and here in LIBRARY - {"zero"}
            is_unrelated |= here in LIBRARY | WITHOUT_JAX and there == "zero.config"
            if ROOMS.index(there) > ROOMS.index(here) or is_unrelated or reexports:
                violations.append(f"{module} imports {name}")
        elif here in LIBRARY:
            standard = PURE | ({"os"} if module in SETS_ENVIRONMENT else set())
            standard |= {"importlib"} if module in IMPORTS_BY_NAME else set()
            if top not in standard | ARRAYS:
                violations.append(f"{module} imports {name}, which touches the world or is no library of arrays")
        elif here in WITHOUT_JAX and top in ARRAYS - {"numpy"}:
            violations.append(f"{module} imports {name}, and has to work without jax")
    return violations


def forbidden_names(source: str) -> list[str]:
    """Uses of shard_map, of jit with shardings, and of anything that unpickles."""
    found = []
    for node in nodes(source):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            found += [n for n in names if n.partition(".")[0] in UNPICKLERS or n.rpartition(".")[2] == "shard_map"]
        elif isinstance(node, ast.Attribute) and node.attr == "shard_map":
            found.append("shard_map")
        elif isinstance(node, ast.keyword):
            allows_pickle = node.arg == "allow_pickle" and not (
                isinstance(node.value, ast.Constant) and node.value.value is False
            )
            if node.arg in ("in_shardings", "out_shardings") or allows_pickle:
                found.append(node.arg or "")
    return found


def files_in_place(source: str) -> list[str]:
    """Calls that write a whole file under its own name: a kill would leave half of it there."""
    calls = [node.func for node in nodes(source) if isinstance(node, ast.Call)]
    return [f.attr for f in calls if isinstance(f, ast.Attribute) and f.attr in ("write_text", "write_bytes")]


def imported_tests(source: str) -> list[str]:
    """The test modules that a file imports, in the programs too that it holds as strings."""
    texts = [ast.unparse(node) for node in nodes(source) if isinstance(node, ast.Import | ast.ImportFrom)]
    texts += [node.value for node in nodes(source) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return [name for text in texts for name in re.findall(r"^(?:from|import) .*?\b(test_\w+)", text, re.MULTILINE)]


def test_imports_point_downward() -> None:
    violations = [line for module, path in SOURCES.items() for line in import_violations(module, path.read_text())]
    assert violations == []


def test_every_room_is_listed() -> None:
    assert {room(module) for module in SOURCES} == set(ROOMS)


def test_few_imports_of_private_jax() -> None:
    """Two files import private modules of jax, for what has no public name; a new version of jax may move them."""
    found = [module for module, path in SOURCES.items() if "jax._src" in path.read_text()]
    assert found == ["zero.hosts.xla_options", "zero.partition.whole_state"]


def test_nothing_forbidden_is_used() -> None:
    uses = {module: forbidden_names(path.read_text()) for module, path in SOURCES.items()}
    assert {module: names for module, names in uses.items() if names} == {}


def test_files_are_written_whole() -> None:
    """By `storage.write`; these write into a folder, or under a name, that is renamed when it is complete."""
    writers = {module for module, path in SOURCES.items() if files_in_place(path.read_text())}
    assert writers == {"zero.corpus.reading.cache", "zero.exchange.export", "zero.exchange.peft_folder"}


def test_no_test_is_imported() -> None:
    """What two test modules share is in tests/helpers, or beside them in a module that is not a test."""
    found = {path.name: imported_tests(path.read_text()) for path in REPOSITORY.glob("tests/**/*.py")}
    assert {name: tests for name, tests in found.items() if tests} == {}


@pytest.mark.parametrize(
    "statement", ["import {}", "from tests.partition import (\n    {},\n)", "from tests.{} import f"]
)
def test_checker_sees_an_imported_test(statement: str) -> None:
    source = statement.format("test_layout")
    assert imported_tests(source) == ["test_layout"]
    program = ast.unparse(ast.parse(source))
    assert imported_tests(f'PROGRAM = """\n{program}\n"""') == ["test_layout"]


def test_imports_have_no_circles() -> None:
    """Neither between files, nor between the rooms of a house or the subrooms and files of a room."""
    graphs = arrows((module, imports(module, path.read_text())) for module, path in SOURCES.items())
    for graph in graphs.values():
        TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("zero.models.gpt", "zero.models.mlp"), ("zero.models.mlp", "zero.models.gpt")),  # two files
        (
            ("zero.corpus.reading.cache", "zero.corpus.text.pieces"),
            ("zero.corpus.text.hub", "zero.corpus.reading.order"),
        ),
        (("zero.run.features.save", "zero.run.restore"), ("zero.run.restore", "zero.run.features")),  # file and subroom
    ],
)
def test_checker_sees_a_circle(one: tuple[str, str], other: tuple[str, str]) -> None:
    graphs = arrows([(one[0], [one[1]]), (other[0], [other[1]])])
    with pytest.raises(CycleError):
        for graph in graphs.values():
            TopologicalSorter(graph).prepare()


PART = re.compile(r"predictor|multi_token|looks_ahead|gated.?unit", re.IGNORECASE)
ASK = ("zero.training.", "zero.exchange.", "zero.inference.")
# The objective of multi-token prediction.
OF_A_PART = {"zero.training.objectives.mtp"}


def test_training_exchange_and_inference_name_no_part() -> None:
    """They ask what a model has, and a part of few models hands it in (`zero.models.branch`, `zero.models.mixers`)."""
    found = {
        module
        for module, path in SOURCES.items()
        if module.startswith(ASK) and module not in OF_A_PART and PART.search(path.read_text())
    }
    assert found == set()
    assert PART.search("as it has gated units") and PART.search("size.predictor") and not PART.search("size.gated")


WHOLE = {"JobConfig", "TrainConfig", "TrainedModelConfig", "EvaluateConfig", "SampleConfig", "PlanConfig"}
PAGES = {"zero.run.config", "zero.inference.config", "zero.planning.config", "zero.commands.modes"}  # which make them
TAKE_A_WHOLE = 6  # files: the modes, what a run's features and its job are made from. It only falls


def takes_a_whole(source: str) -> bool:
    """Whether a function or a field of this source has the type of a whole configuration."""
    annotations = [node.annotation for node in nodes(source) if isinstance(node, ast.arg | ast.AnnAssign)]
    names = {
        node.id for each in annotations if each is not None for node in ast.walk(each) if isinstance(node, ast.Name)
    }
    return bool(names & WHOLE)


def test_few_files_take_a_whole_configuration() -> None:
    """Functions take the sections that they read."""
    taking = [module for module, path in SOURCES.items() if takes_a_whole(path.read_text()) and module not in PAGES]
    assert len(taking) <= TAKE_A_WHOLE, f"{taking}: pass the sections that a function reads"
    assert takes_a_whole("def f(config: TrainConfig): pass") and not takes_a_whole("def f(config: Keys): pass")


WITHOUT_A_SOURCE = 21  # files of tests. It only falls


def source_of(test: Path) -> Path | None:
    """The module or folder that tests/ROOM/test_NAME.py or tests/ROOM/test_NAME_and_more.py is named after."""
    words = test.stem.split("_")[1:]
    folder = test.parent.relative_to(REPOSITORY / "tests")
    places = [REPOSITORY / "zero" / folder, REPOSITORY / folder]  # zero/ROOM; examples, benchmarks, docs
    if folder == Path("helpers"):
        places = [test.parent]
    for count in range(len(words), 0, -1):
        name = "_".join(words[:count])
        for place in places:
            for path in (place / f"{name}.py", place / name):
                if path.exists():
                    return path
    return None


def test_tests_mirror_the_sources() -> None:
    """Whoever changes a module finds its tests by its name; some tests are of the whole, and of no module."""
    without = [path.name for path in REPOSITORY.glob("tests/**/test_*.py") if source_of(path) is None]
    assert len(without) <= WITHOUT_A_SOURCE, f"{sorted(without)}: name a file of tests after the module that it tests"


@pytest.mark.parametrize(
    ("test", "source"),
    [
        ("partition/test_layout.py", "zero/partition/layout.py"),
        ("partition/test_sharded_optimizer_of_optax.py", "zero/partition/sharded_optimizer.py"),
        ("run/test_features.py", "zero/run/features"),
        ("benchmarks/test_storm.py", "benchmarks/storm.py"),
        ("test_main_zero.py", "main_zero.py"),
        ("models/test_layout.py", None),
        ("partition/test_lay.py", None),
    ],
)
def test_source_of_a_test(test: str, source: str | None) -> None:
    assert source_of(REPOSITORY / "tests" / test) == (source and REPOSITORY / source)


def pmap_uses(source: str) -> int:
    """How often a source takes `pmap` from jax."""
    used = [node for node in nodes(source) if isinstance(node, ast.Attribute) and node.attr == "pmap"]
    imported = [node for node in nodes(source) if isinstance(node, ast.ImportFrom) and node.module == "jax"]
    return sum(ast.unparse(node.value) == "jax" for node in used) + sum(
        alias.name == "pmap" for node in imported for alias in node.names
    )


def test_one_file_uses_pmap() -> None:
    """One file builds programs for all devices.

    What jax changes about pmap is changed in one place.
    """
    assert pmap_uses("import jax\njax.pmap(f)") == pmap_uses("from jax import pmap") == 1
    assert [module for module, path in SOURCES.items() if pmap_uses(path.read_text())] == ["zero.partition.pmapped"]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("zero.partition.layout", "import os"),
        ("zero.partition.layout", "import scipy"),
        ("zero.partition.layout", "def f():\n    from zero.models import gpt"),
        ("zero.models.gpt", "from ..partition.layout import Layout"),
        ("zero.models.gpt", "from zero.partition import stages"),
        ("zero.training.step", "from zero.hosts import agreement"),
        ("zero.training.step", "import pathlib"),
        ("zero.training.step", "from zero.config.check import check"),
        ("zero.base.keys", "import jax"),
        ("zero.corpus.reading.loader", "from zero.config.files import read_yaml"),
        ("zero.record.metrics_file", "import main_zero"),
        ("zero.corpus.reading.loader", "import jax"),
        ("zero.files.parsing", "from zero.corpus.reading import shards"),
        ("zero.run.train", "from zero.planning import plan"),
        ("zero.planning.plan", "from zero.run import train"),
        ("zero.run.data", "from zero.corpus.preparing.prepare_if_missing import prepare_if_missing"),
        ("zero.models.gpt", "from zero import gather"),
        ("zero.training.step", "import zero"),
        ("zero", "from zero.tracking import metrics_file"),
    ],
)
def test_checker_sees_a_wrong_import(module: str, source: str) -> None:
    assert len(import_violations(module, source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from jax import shard_map",
        "from jax.experimental.shard_map import shard_map",
        "jax.shard_map(f)",
        "jax.jit(f, in_shardings=s)",
        "np.load(f, allow_pickle=True)",
    ],
)
def test_checker_sees_a_forbidden_name(source: str) -> None:
    assert forbidden_names(source)


def test_step_names_no_feature() -> None:
    """The step names none of the features that it composes."""
    words = set(re.findall("[a-z]+", SOURCES["zero.training.step"].read_text().lower()))
    assert words & {"codebook", "ema", "spike", "spikes", "clip", "dropout", "expert", "experts", "routing"} == set()


def test_import_zero_loads_no_heavy_library() -> None:
    """Not even jax, before a public name is used."""
    heavy = [
        "jax",
        "numpy",
        "flax",
        "hydra",
        "omegaconf",
        "wandb",
        "webdataset",
        "google.cloud",
        "google.auth",
        "orbax",
        "matplotlib",
        "tokenizers",
    ]
    code = f"import sys, zero; print(*[name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if inspect.isfunction(getattr(zero, name))])
def test_public_functions_have_examples(name: str) -> None:
    """Each public function has an example that runs."""
    function = getattr(zero, name)
    found = doctest.DocTestFinder(recurse=False).find(function, module=sys.modules[function.__module__])
    assert any(test.examples for test in found)


def test_public_names_are_loaded_when_used() -> None:
    """`dir` lists them before, and static types come from the module that has them."""
    code = """if True:
        import sys, zero
        assert "jax" not in sys.modules
        print(*dir(zero))
        assert zero.local and "jax" in sys.modules
    """
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert {*FUNCTIONS, *TYPES, *MODULES, "__version__"} == {*done.stdout.split()}


def test_static_types_are_those_of_the_public_names() -> None:
    """Type checkers see the imports of `zero/__init__.py`, programs its table."""
    nodes_of_zero = nodes(SOURCES["zero"].read_text())
    imported = {alias: node for node in nodes_of_zero if isinstance(node, ast.ImportFrom) for alias in node.names}
    static = {alias.asname: str(node.module) for alias, node in imported.items() if alias.asname is not None}
    assert sorted(static) == sorted([*FUNCTIONS, *TYPES, *MODULES])
    for name, module in static.items():
        assert getattr(zero, name) is getattr(sys.modules[module], name)


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="module 'zero' has no attribute 'nothing'"):
        getattr(zero, "nothing")  # noqa: B009  mypy knows that there is none


def test_picture_of_the_rooms_is_that_of_the_imports() -> None:
    """docs/pictures/rooms.svg shows today's rooms and who imports whom: `python -m docs.draw_rooms` draws it again."""

    def shown(picture: str) -> list[str]:
        return re.findall("<(?:title|text)[^>]*>([^<]*)", picture)

    assert shown(draw_rooms.PICTURE.read_text()) == shown(draw_rooms.picture())


def parallel_assignments(source: str) -> list[int]:
    """The lines of assignments of several unrelated values; swaps and constants are none."""
    lines = []
    for node in nodes(source):
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Tuple)
            and isinstance(node.value, ast.Tuple)
        ):
            targets = {ast.unparse(target) for target in node.targets[0].elts}
            values = node.value.elts
            is_swap = bool(targets & {ast.unparse(value) for value in values})
            if not is_swap and not all(isinstance(value, ast.Constant) for value in values):
                lines.append(node.lineno)
    return lines


def nested_ternaries(source: str) -> list[int]:
    """The lines of ternaries within a ternary."""
    ternaries = [node for node in nodes(source) if isinstance(node, ast.IfExp)]
    return [
        node.lineno
        for node in ternaries
        if any(isinstance(inner, ast.IfExp) for inner in ast.walk(node) if inner is not node)
    ]


def test_statements_say_one_thing() -> None:
    """A reader meets one assignment per statement, and no condition within another."""
    sources = [path.read_text() for module, path in SOURCES.items() if module.startswith("zero")]
    lines = sum(source.count("\n") for source in sources)
    assert 1000 * sum(len(parallel_assignments(source)) for source in sources) / lines <= 0.5
    assert [ternary for source in sources for ternary in nested_ternaries(source)] == []


@pytest.mark.parametrize(
    ("source", "parallel", "nested"),
    [
        ("a, b = f(), g()", [1], []),
        ("a, b = b, a", [], []),
        ("a, b = 0, 1", [], []),
        ("a, b = f()", [], []),
        ("x = 1 if a else (2 if b else 3)", [], [1]),
        ("x = 1 if a else 2", [], []),
    ],
)
def test_checker_sees_statements_that_say_two_things(source: str, parallel: list[int], nested: list[int]) -> None:
    assert (parallel_assignments(source), nested_ternaries(source)) == (parallel, nested)
