"""docs/how-to/when-pmap-goes.md lists every use of an interface of jax that may move."""

import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
UNSTABLE = re.compile(r"jax\._src\.\w+|jax\._src import \w+|jax\.extend\.\w+|jax\.experimental(?:\.\w+| import \w+)")


def test_every_use_is_listed() -> None:
    page = (REPOSITORY / "docs/how-to/when-pmap-goes.md").read_text()
    rows = re.findall(r"^\| `(jax\.[\w.]+)` \| (.*?) \|", page, re.MULTILINE)
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
