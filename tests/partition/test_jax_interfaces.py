"""docs/how-to/when-pmap-goes.md lists every use of an interface that may move: of jax, and private ones of others."""

import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs/how-to/when-pmap-goes.md"
PRIVATE = re.compile(r"^ *(?:from|import) (?!jax\b|zero\b)(\w[\w.]*\._\w+)", re.MULTILINE)  # modules of other libraries
UNSTABLE = re.compile(r"jax\._src\.\w+|jax\._src import \w+|jax\.extend\.\w+|jax\.experimental(?:\.\w+| import \w+)")


def test_every_use_is_listed() -> None:
    rows = re.findall(r"^\| `(jax\.[\w.]+)` \| (.*?) \|", PAGE.read_text(), re.MULTILINE)
    listed = {interface: re.findall(r"`([\w./]+)`", places) for interface, places in rows}
    used: dict[str, set[str]] = {interface: set() for interface in listed}
    for path in REPOSITORY.glob("zero/**/*.py"):
        for found in UNSTABLE.findall(path.read_text()):
            used.setdefault(found.replace(" import ", "."), set()).add(path.relative_to(REPOSITORY / "zero").as_posix())
    assert sorted(used) == sorted(listed)
    for interface, files in used.items():
        places = listed[interface]
        assert {place for place in places if any(file.startswith(place) for file in files)} == set(places)
        assert {file for file in files if not file.startswith(tuple(places))} == set(), interface


def test_private_modules_are_listed() -> None:
    line = PAGE.read_text().partition("Private modules of other libraries: ")[2]
    listed = {*re.findall(r"`([\w.]+\._\w+)` in `([\w./]+)`", line)}
    used = set()
    for path in REPOSITORY.glob("zero/**/*.py"):
        place = path.relative_to(REPOSITORY / "zero").as_posix()
        used |= {(module, place) for module in PRIVATE.findall(path.read_text())}
    assert used == listed
