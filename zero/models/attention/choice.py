"""The values of `model.attention`, and the context from which `auto` computes attention in blocks."""

from __future__ import annotations

# The number of positions from which `auto` is blockwise. On CPU it is faster from there on; elsewhere time has not been
# measured, and from 4,096 positions on the scores of 12 heads need 0.75 GiB per row.
BLOCKWISE_FROM = {"cpu": 512}
_BLOCKWISE_FROM_ELSEWHERE = 4096
CHOICES = ("auto", "dense", "blockwise", "kernel")


def blockwise_from(choice: str, platform: str) -> int | None:
    """The number of query positions from which attention is blockwise; None for never.

    A single query, as in decoding, has no matrix of scores and is always dense.

    Args:
      choice: "auto", "dense", "blockwise", or "kernel": what a kernel does not compute is computed as by "auto".
      platform: "cpu", "tpu", "gpu", ...

    >>> blockwise_from("dense", "cpu"), blockwise_from("blockwise", "cpu")
    (None, 2)
    """
    if choice in ("auto", "kernel"):
        return BLOCKWISE_FROM.get(platform, _BLOCKWISE_FROM_ELSEWHERE)
    return {"dense": None, "blockwise": 2}[choice]
