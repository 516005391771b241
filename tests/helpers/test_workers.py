"""What a worker of pytest-xdist imports before its first test and keeps for started programs; which files it runs."""

import ast
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock, patch

import pytest

from tests.helpers import workers
from tests.helpers.rooms import REPOSITORY, SOURCES
from tests.helpers.workers import WITH_PYTORCH, HeldOnce, held, turn

LARGE = {"conversion", "datasets", "gcsfs", "gguf", "lm_eval", "matplotlib", "pandas", "peft", "pyarrow", "torch"}
LARGE |= {"transformers", "wandb"}
PROGRAMS = ("benchmarks", "docs")  # folders with programs, of which tests import some


def first_imports(source: str) -> list[str]:
    """The modules that a file imports when it is imported, and not when one of its functions is called.

    >>> first_imports("import os.path\\nfrom a import b\\ndef f():\\n    import c")
    ['os.path', 'a', 'a.b']
    """
    found = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            base = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            found += [base, *(f"{base}.{name}" for name in names)] if base else names
        elif isinstance(node, ast.Expr | ast.Assign) and isinstance(node.value, ast.Call):
            is_import = ast.unparse(node.value.func) == "pytest.importorskip"
            found += [ast.literal_eval(node.value.args[0])] if is_import else []
    return found


def large_imports(source: str, large: set[str]) -> list[str]:
    return [name for name in first_imports(source) if name in large or name.partition(".")[0] in LARGE]


def test_collecting_imports_no_large_library() -> None:
    """A module of tests, or of zero with an example, brings no library that takes seconds and a hundred MiB.

    Every worker imports all of them; the tests that need such a library import it.
    """
    texts = {name: path.read_text() for name, path in SOURCES.items()}
    large = {name for name, text in texts.items() if large_imports(text, set())}
    assert large == {
        "zero.checkpoints.orbax_buckets",
        "zero.corpus.adapters.torch_dataset",
        "zero.exchange.modeling_zero",
        "zero.inference.lm_eval_adapter",
        "zero.report.plot",
    }
    programs = {f"{place}.{path.stem}": path for place in PROGRAMS for path in (REPOSITORY / place).glob("*.py")}
    large |= {name for name, path in programs.items() if large_imports(path.read_text(), large)}
    tests = {str(path): path.read_text() for path in REPOSITORY.glob("tests/**/*.py")}
    texts = {name: text for name, text in texts.items() if name not in large or ">>>" in text}
    assert {name: found for name, text in (texts | tests).items() if (found := large_imports(text, large))} == {}


@pytest.mark.parametrize(
    "statement",
    ["import torch.nn", "from wandb import init", "from zero.report import plot", 'pytest.importorskip("peft")'],
)
def test_checker_sees_a_large_library(statement: str) -> None:
    assert large_imports(statement, {"zero.report.plot"}) and not large_imports(f"def f():\n    {statement}", set())


@pytest.mark.parametrize(
    ("name", "examples"),
    [
        ("PyTorch", {"tests/exchange/test_peft_folder.py", "tests/training/objectives/test_dpo_and_trl.py"}),
        ("libtpu", {"tests/costs/test_hlo.py", "tests/partition/collectives/test_arrays.py"}),
        ("lasting runs", {"tests/run/test_resume.py", "tests/test_main_zero.py"}),
    ],
)
def test_files_of_one_worker_are_known(name: str, examples: set[str]) -> None:
    """Those of which one worker runs all, so that the others do without the library or the process."""
    files = [str(path.relative_to(REPOSITORY)) for path in REPOSITORY.glob("tests/**/test_*.py")]
    found = {file for file in files if held(file) == name}
    assert examples <= found
    assert "tests/exchange/test_average.py" not in found and len(found) < len(files) / 5


def test_files_take_turns(request: pytest.FixtureRequest) -> None:
    """Those with PyTorch are first, whose worker takes no others; those with libtpu, which stays loaded, are last."""
    turns = [turn(item.nodeid) for item in request.session.items]
    assert "PYTEST_XDIST_WORKER" not in os.environ or turns == sorted(turns)
    files = ("exchange/test_peft_folder.py", "run/test_data.py", "costs/test_hlo.py")
    assert [turn(f"tests/{file}") for file in files] == [0, 1, 2]


@pytest.mark.parametrize("count", [1, 2])
def test_a_worker_with_pytorch_takes_no_other_file(count: int) -> None:
    """The others do, until none is left; a single one takes all files."""
    nodes = [Mock(shutting_down=False) for _ in range(count)]
    config = Mock(option=Mock(loadscopereorder=False))
    config.getvalue.return_value = ["popen"] * count
    scheduling = HeldOnce(config, Mock())
    files = ["tests/exchange/test_peft_folder.py", *(f"tests/test_{number}.py" for number in range(3))]
    collection = [f"{file}::test_{number}" for file in files for number in range(3)]
    with patch.object(workers, "held", lambda file: "PyTorch" if "peft" in file else None):
        for node in nodes:
            scheduling.add_node(node)
            scheduling.add_node_collection(node, collection)
        scheduling.schedule()
        assert next(iter(scheduling.assigned_work[nodes[0]])) == WITH_PYTORCH
        for node in nodes:
            for number, test in enumerate(collection):
                if test in {name for unit in scheduling.assigned_work[node].values() for name in unit}:
                    scheduling.mark_test_complete(node, number)
    of_first, *of_others = (list(scheduling.assigned_work[node]) for node in nodes)
    assert of_first == [WITH_PYTORCH, *files[1:]] if count == 1 else of_first == [WITH_PYTORCH]
    assert count == 1 or len(of_others[0]) > 1


def test_examples_of_modules_have_the_hooks_of_tests(request: pytest.FixtureRequest) -> None:
    """They compile as quickly and give memory back, though pytest has no hook of tests/conftest.py for them."""
    hooks = request.session.gethookproxy(REPOSITORY / "zero" / "job.py")
    for hook in (hooks.pytest_runtest_setup, hooks.pytest_runtest_teardown):
        assert "Everywhere" in {type(one.plugin).__name__ for one in hook.get_hookimpls()}


def test_started_programs_keep_bytecode(tmp_path: Path) -> None:
    """Also where the environment forbids it, but then not beside the sources."""
    (tmp_path / "imported.py").write_text("")
    program = (
        "import tests.helpers.bytecode, sys, subprocess; subprocess.run([sys.executable, '-c', 'import imported'])"
    )
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": f"{REPOSITORY}:{tmp_path}"}
    environment.pop("PYTHONPYCACHEPREFIX", None)
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
    prefix = REPOSITORY / ".pytest_cache" / "bytecode"
    (kept,) = prefix.joinpath(*tmp_path.parts[1:]).glob("imported.*.pyc")
    assert kept.stat().st_size > 0
    kept.unlink()
    assert [path.name for path in tmp_path.iterdir()] == ["imported.py"]
