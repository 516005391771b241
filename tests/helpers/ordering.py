"""`unordered` and `unordered_when_compiled` find collectives that do not wait for those before them."""

import re
from typing import Any

import jax


def unordered(jaxpr: Any) -> list[tuple[str, str]]:
    """Pairs of operations with collectives, the second without a path from the first, on any level."""
    found, levels = [], [jaxpr]
    while levels:
        level = levels.pop()
        reached: dict[Any, set[int]] = {}  # by variable: the operations with collectives that it depends on
        seen: list[str] = []
        for eqn in level.eqns:
            inner = [sub.jaxpr if hasattr(sub, "jaxpr") else sub for sub in jax.tree.leaves(list(eqn.params.values()))]
            inner = [sub for sub in inner if hasattr(sub, "eqns")]
            levels += inner
            reach = [reached.get(v, set()) for v in eqn.invars if not hasattr(v, "val")]
            # Each operand of a collective may become one of its own in the compiled program.
            is_collective = not inner and "batch" in str(eqn.params)
            before = set.intersection(*reach) if is_collective and reach else set().union(*reach)
            if "batch" in str(eqn):  # an operation of the axis, or one that holds some
                found += [(seen[i], eqn.primitive.name) for i in range(len(seen)) if i not in before]
                before = before | {len(seen)}
                seen.append(eqn.primitive.name)
            reached |= dict.fromkeys(eqn.outvars, before)
        if not {"scan", "while", "cond", "checkpoint"} & set(seen):
            found = [pair for pair in found if pair[0] not in seen]  # a level without loops is in order anyway
    return found


def unordered_when_compiled(text: str) -> list[tuple[str, str]]:
    """Pairs of a loop and a collective, or of two loops, of which the second does not use the first, in compiled text.

    jax unrolls loops before XLA sees them, and a program that is read from the persistent cache has no other order
    than that of the data.
    """
    bodies = dict(re.findall(r"^(?:ENTRY )?(%[\w.-]+) \(.*?\{\n(.*?)^\}", text, re.M | re.S))
    names = {
        name: [line.groups() for line in re.finditer(r"^ +(?:ROOT )?(%[\w.-]+) = (.*)", body, re.M)]
        for name, body in bodies.items()
    }
    collective = re.compile(r" (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)\(")

    def has_collective(value: str) -> bool:
        called = re.findall(r"body=(%[\w.-]+)", value)
        return bool(collective.search(value)) or any(has_collective(v) for name in called for _, v in names[name])

    found = []
    for lines in names.values():
        reached: dict[str, set[str]] = {}
        seen: dict[str, str] = {}
        for name, value in lines:
            operands = [operand for operand in re.findall(r"%[\w.-]+", value) if operand in reached]
            reached[name] = set(operands).union(*(reached[operand] for operand in operands))
            if has_collective(value):
                pairs = [(one, name) for one in seen if one not in reached[name]]
                found += [pair for pair in pairs if not all(collective.search((seen | {name: value})[x]) for x in pair)]
                seen[name] = value
    return found
