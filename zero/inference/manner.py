"""How tasks of EleutherAI's lm-evaluation-harness are prompted."""

from __future__ import annotations

from typing import NamedTuple

from zero.corpus.text.chat_template import ChatTemplate


class Manner(NamedTuple):
    """How the tasks are prompted.

    Attributes:
      template: renders prompts as turns of a conversation; None: prompts are texts to continue.
      system: a text before each prompt.
      few_shots: examples in each prompt; None: each task's own number.
      limit: documents of each task; None: all.
    """

    template: ChatTemplate | None = None
    system: str | None = None
    few_shots: int | None = None
    limit: int | None = None


PLAIN = Manner()
