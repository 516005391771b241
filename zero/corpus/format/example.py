"""What an objective learns from, as zero-prepare writes it and a loader reads it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Example:
    """One example of a corpus, which is one row of the data.

    Attributes:
      texts: the texts of an example, each a row of `zero.training.batch.Batch`. A shard holds them as `(n, texts, T)`.
      option: the option of zero-prepare that makes such a corpus; empty for rows of running text.
      members: arrays of a shard beside the tokens, `(n,)`, which become entries of `Batch.extra` with these names.
      optional: of these texts, the last ones that may have no learned tokens.
      below: what the values of members are below, from 0 on; None: they may be any.
    """

    texts: int = 1
    option: str = ""
    members: tuple[str, ...] = ()
    optional: int = 0
    below: int | None = None

    @property
    def is_whole(self) -> bool:
        """Whether a row is a whole text, which is neither cut nor joined with others."""
        return bool(self.option)


TEXT = Example()
PAIR = Example(texts=2, option="--preferences")
LABELLED = Example(texts=2, option="--labels", members=("label",), optional=1)
CLASSIFIED = Example(option="--classification", members=("label",))
