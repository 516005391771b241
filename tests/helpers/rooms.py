"""The rooms of the house and who imports whom, read from the sources.

- `ROOMS`: from the lowest to the highest; `WITHOUT_JAX`: those that work where jax is not installed; `LIBRARY`: those
  that touch no file, network or process.
- `SOURCES`: the path of each module. `room`: of a module.
- `arrows`: what the files and folders of each folder import from each other.
- `imports`: the modules that a source imports. `nodes`: the nodes of its syntax tree, parsed once for all tests.
"""

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
# The rooms of the house, from the lowest to the highest. A module imports only from its own package or from packages
# below it.
ROOMS = [
    "zero.base",
    "zero.files",
    "zero.config",  # how keys are checked and composed; it has no key of anybody
    "zero.pages",
    "zero.corpus",
    "zero.partition",
    "zero.models",
    "zero.hosts",
    "zero.costs",
    "zero",  # its __init__.py, the public names
    "zero.training",
    "zero.job",
    "zero.record",
    "zero.checkpoints",
    "zero.tracking",
    "zero.exchange",
    "zero.inference",
    "zero.report",
    "zero.run",
    "zero.planning",
    "zero.commands",
    "scripts",  # main_zero.py, data/prepare.py
]
LIBRARY = {"zero.partition", "zero.models", "zero.training", "zero"}  # these touch no file, network or process
WITHOUT_JAX = {"zero.base", "zero.files", "zero.pages", "zero.corpus"}  # these import no jax

SOURCES = {
    ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__"): path
    for path in [*REPOSITORY.glob("zero/**/*.py"), *REPOSITORY.glob("data/*.py"), *REPOSITORY.glob("*.py")]
}


def room(module: str) -> str:
    """The room that a module of this repository is in.

    >>> room("zero.corpus.reading.loader"), room("zero"), room("main_zero")
    ('zero.corpus', 'zero', 'scripts')
    """
    if module.partition(".")[0] != "zero":
        return "scripts"
    return ".".join(module.split(".")[:2])


@cache
def nodes(source: str) -> list[ast.AST]:
    """All nodes of the syntax tree, as `ast.walk` has them."""
    return list(ast.walk(ast.parse(source)))


def imports(module: str, source: str) -> Iterator[str]:
    """Every module that the source imports, inside functions too: `zero.corpus.text.tokenizers`, `jax.numpy`, `os`."""
    package = module if SOURCES.get(module, Path()).name == "__init__.py" else module.rpartition(".")[0]
    for node in nodes(source):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                yield whole if whole in SOURCES else base


def arrows(imported: Iterable[tuple[str, Iterable[str]]]) -> dict[str, dict[str, set[str]]]:
    """For each folder, what each of its files and folders imports from others of them.

    Args:
      imported: modules, each with the modules that it imports.

    >>> arrows([("zero.models.gpt", ["zero.models.attention.dense", "zero.partition.layout", "os"])])
    {'zero.models': {'gpt': {'attention'}}, 'zero': {'models': {'partition'}}}
    """
    graphs: dict[str, dict[str, set[str]]] = {}
    for module, names in imported:
        for name in names:
            if name in SOURCES and name != module:
                importing = [*module.split("."), "__init__"]
                used = [*name.split("."), "__init__"]
                depth = next(i for i, (a, b) in enumerate(zip(importing, used, strict=False)) if a != b)
                folder = graphs.setdefault(".".join(importing[:depth]), {})
                folder.setdefault(importing[depth], set()).add(used[depth])
    return graphs
