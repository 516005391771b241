"""Classification of texts: cross-entropy of the head's scores of the last token of a text and the label of the text.

Source: the loss of ForSequenceClassification in transformers, with `problem_type` single_label_classification, averaged
over the texts of the global batch.

Shapes: E texts of one device, C classes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from zero.base.keys import Mistakes, at_least, key, list_of, named, not_empty
from zero.corpus.format.example import CLASSIFIED
from zero.models.config import GPTConfig
from zero.training.batch import Entry
from zero.training.objectives.objective import Mean, Objective, ObjectiveKeys
from zero.training.objectives.whole_texts import HEAD, Texts, has_last_token, outputs_of_head, whole_texts

ACCURACY = Mean("accuracy", "share of the texts whose label has the highest score", "Accuracy", "share")
CONFUSION = "confusion"  # begins the names of the shares of texts by their label and the label with the highest score
MOST_CONFUSED = 20  # classes, of which evaluations report the confusion
LABEL = Entry(CLASSIFIED.members[0], of="example", dtype="int32")


@dataclass(frozen=True)
class Classification(ObjectiveKeys):
    """Classification of texts of zero-prepare --classification.

    It trains a model with as many model.override.score_outputs as classes. docs/how-to/classify.md
    """

    name: str = named("classification")
    num_labels: int = key(2, at_least(2), "Number of classes; the labels of the data are below it.")
    label_names: list[str] | None = key(
        None, list_of(not_empty()), "Names of the classes, which exports have; null: LABEL_0 and so on."
    )

    def mistakes(self, model_config: GPTConfig, model_label: str) -> Mistakes:
        if model_config.score_outputs not in (None, self.num_labels):
            yield "objective.num_labels", f"{model_config.score_outputs}, the score_outputs of {model_label}"
        names = self.label_names
        if names is not None and not len(names) == len({*names}) == self.num_labels:
            yield "objective.label_names", f"objective.num_labels={self.num_labels} different names"

    def objective(self) -> Objective:
        return whole_texts(
            self.losses,
            (ACCURACY, *_confusion(self.num_labels)),
            (LABEL,),
            replace(CLASSIFIED, below=self.num_labels),
            outputs_of_head,
            (HEAD,),
            has_last_token,
        )

    def losses(self, texts: Texts) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The loss of each text `(E,)` and its metrics."""
        scores_EC = texts.values[:, 0]
        label_E = texts.extra[LABEL.name]
        losses = -jnp.take_along_axis(jax.nn.log_softmax(scores_EC), label_E[:, None], axis=1)[:, 0]
        chosen_E = jnp.argmax(scores_EC, axis=1)
        metrics = {ACCURACY.name: (chosen_E == label_E).astype(jnp.float32)}
        for metric in _confusion(self.num_labels):
            _, label, chosen = metric.name.split("/")
            is_this = (label_E == int(label)) & (chosen_E == int(chosen))
            metrics[metric.name] = is_this.astype(jnp.float32)
        return losses, metrics


def _confusion(classes: int) -> tuple[Mean, ...]:
    """A metric for each label and each label with the highest score; none if these are too many."""
    if classes > MOST_CONFUSED:
        return ()
    sentence = "share of the texts with the first label of which the second one has the highest score"
    pairs = [(label, chosen) for label in range(classes) for chosen in range(classes)]
    return tuple(
        Mean(f"{CONFUSION}/{label}/{chosen}", sentence, "Confusion", "share", evaluated=True) for label, chosen in pairs
    )
