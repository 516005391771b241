"""`unordered` finds collectives of a jaxpr that do not wait for those before them."""

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
