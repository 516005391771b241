"""From text to batches of token ids: preparing, tokenizers, reading. Needs neither jax nor a configuration.

    from zero.corpus import Rows

    rows = Rows("data/index/mine_train.index", batch=256, context=1024, seed=0, host=3, hosts=8)
    for tokens in rows:                     # int32 (32, 1024), this host's part of each batch
        ...
    state = rows.state()                    # a small dict; Rows(..., state=state) continues, on any number of hosts

`zero.corpus.adapters` has the same rows for PyTorch, Grain and webdataset.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zero.corpus.rows import Rows as Rows

__all__ = ["Rows"]


def __getattr__(name: str) -> Any:
    """The public name, imported when it is first used: preparing text does without a loader."""
    if name != "Rows":
        raise AttributeError(f"module 'zero.corpus' has no attribute {name!r}")
    from zero.corpus.rows import Rows

    globals()[name] = Rows
    return Rows
