"""The features of a run, in the order in which they act after a step.

Each effect is on disk before the next one begins, but for a checkpoint: Save begins it, and it is committed while the
features after it act.

| order | feature | effect | a kill right after it, and what the next start does |
|---|---|---|---|
| 1 | Profile, Statistics, Verify | measure the step | nothing is on disk: the step is trained again |
| 2 | Limits | ends a run beyond its limits | nothing beyond a limit was written |
| 3 | Validate, Harness | add their results to the line | they are computed again after the step is trained again |
| 4 | Track | the line in metrics.jsonl, W&B, TensorBoard | it stays; readers skip lines that a resume trained again |
| 5 | Bar, Largest | the terminal, the log | |
| 6 | Save | the run's files are mirrored, a checkpoint begins | resumes from the one before |
| - | | the checkpoint is committed | resumes from it; later actions that are not done are pending in it |
| 7 | Protect | an emergency checkpoint | resumes from it; later actions are pending in it |
| 8 | Sample | the text in samples.txt | a resume from an older step removes it; else it is not written again |
| 9 | Report | run.png, report.html | after the last step, a page older than the metrics is drawn again |

A checkpoint says which later actions were due (`TrainingPosition.pending`), a stop adds those that it prevented, and
the next start does what the files of the run do not show to be done (`zero/run/pending.py`).
"""

from __future__ import annotations

from zero.config.declared import declare
from zero.run.feature import Feature
from zero.run.features.bar import Bar
from zero.run.features.harness import Harness
from zero.run.features.largest import Largest
from zero.run.features.limits import Limits
from zero.run.features.profile import Profile
from zero.run.features.protect import Protect
from zero.run.features.report import Report
from zero.run.features.sample import Sample
from zero.run.features.save import Save
from zero.run.features.statistics import Statistics
from zero.run.features.track import Track
from zero.run.features.validate import Validate
from zero.run.features.verify import Verify

FEATURES: tuple[type[Feature], ...] = (
    *(Profile, Statistics, Verify, Limits, Validate, Harness),  # measure
    *(Track, Bar, Largest),  # show the line
    *(Save, Protect, Sample, Report),  # act on it
)

for kind in FEATURES:
    declare(kind.name, kind.Config)
