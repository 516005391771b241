"""The metrics of an objective on whole examples: such as the accuracy of pairs by a reward model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from typing import Any

import jax

from zero.base.errors import UserError
from zero.base.keys import Mistakes
from zero.corpus.format.shards import RowFormat
from zero.corpus.reading.keys import SetKeys
from zero.corpus.reading.loader import ONCE, Batching, Loader
from zero.corpus.reading.prefetch import prefetch
from zero.hosts import agreement
from zero.hosts.watchdog import progress
from zero.inference.index_keys import check_tokenizer, contents_of_sets
from zero.inference.output import Output
from zero.inference.outputs.validation import Validation, scores_examples
from zero.inference.scoring import Scorer
from zero.models.config import GPTConfig
from zero.partition.pmapped import pmap
from zero.tracking.progress import Stage
from zero.training.inference import evaluate_step
from zero.training.objectives.objective import Objective, ObjectiveKeys, divided, without_terms
from zero.training.programs import for_inference

Evaluate = Callable[..., tuple[jax.Array, jax.Array, dict[str, jax.Array]]]


class Examples(Output):
    """`evaluate.validation` of a run on whole examples, such as pairs: the means over the examples of all sets.

    It takes the place of `Validation` where `scores_examples` says so.
    """

    key = Validation.key

    def __init__(self, keys: Validation.Keys, data: SetKeys, of_training: ObjectiveKeys) -> None:
        self._keys = keys
        self._data = data
        self._objective = of_training

    @property
    def is_asked(self) -> bool:
        return self._keys.validation and scores_examples(self._keys, self._objective.objective())

    def mistakes(self, model_config: GPTConfig, model_label: str) -> Mistakes:
        for branch in self._objective.objective().branches:
            if self.is_asked and not getattr(model_config, branch.key):
                yield "objective", f"another one, as {model_label} has no {branch.noun}"
        if self.is_asked:
            yield from self._objective.mistakes(model_config, model_label)

    def identity(self) -> dict[str, Any]:
        sets = self._keys.sets(self._data)
        return {"sets": contents_of_sets(sets)}

    def evaluate(self, scorer: Scorer) -> dict[str, Any]:
        chosen = self._objective.objective()
        sets = self._keys.sets(self._data)
        check_tokenizer(sets, scorer.trained.tokenizer)
        model = for_inference(scorer.trained.model)
        evaluate = pmap(partial(evaluate_step, model=model, objective=chosen), model.axis.name, out_axes=None)
        sums = {name: _sums(scorer, evaluate, chosen, index) for name, index in sets.items()}
        names = ("loss", "examples", *chosen.names)
        total = {name: sum(of_set[name] for of_set in sums.values()) for name in names}
        named = {name: _means(chosen, of_set) for name, of_set in sums.items() if name}
        if not named:
            return _means(chosen, total)
        return {**_means(chosen, total), "sets": named}


def _sums(scorer: Scorer, evaluate: Evaluate, chosen: Objective, index: str | list[str]) -> dict[str, float]:
    """Sums over the examples of a set, each once: of the losses, their number, and those of the metrics."""
    example = chosen.example
    form = RowFormat(scorer.context, scorer.trained.model.config.vocab_size, only_completions=True, example=example)
    loader = Loader(index, Batching(scorer.batch_rows), form, ONCE, on_one_host=agreement.on_host_0)
    stage = Stage("examples scored", -(-loader.rows // scorer.batch_rows), is_shown=jax.process_index() == 0)
    sums = dict.fromkeys(("loss", "examples", *chosen.names), 0.0)
    with closing(prefetch(loader.batches())) as batches, stage:
        for batch in stage.counted(batches):
            progress()
            rows = scorer.split(batch.tokens.reshape(example.texts * len(batch.tokens), -1))
            extra = {entry.name: scorer.split(batch.extra[entry.name].astype(entry.dtype)) for entry in chosen.reads}
            loss, terms, metrics = jax.device_get(evaluate(scorer.trained.params, rows, extra))
            for name, value in {"loss": loss, "examples": terms, **metrics}.items():
                sums[name] += value.item()
    if not sums["examples"]:
        raise UserError(f"{index}: its rows have no example to score")
    return sums


def _means(chosen: Objective, sums: Mapping[str, float]) -> dict[str, Any]:
    """The mean of the losses and the metrics, and the number of examples."""
    left_out = without_terms(chosen.metrics, sums)
    means = {name: x for name, x in divided(chosen.metrics, sums, sums["examples"]).items() if name not in left_out}
    return {"loss": sums["loss"] / sums["examples"], **means, "examples": int(sums["examples"])}
