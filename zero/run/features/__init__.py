"""The features of a run, in the order in which they act after a step.

Each effect is on disk before the next one begins, except for a checkpoint: Save begins it, and it is committed while
later features act.

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
| 10 | Export | the Hugging Face folder, after the last step | it is written then, unless it is there |

A checkpoint says which later actions were due (`TrainingPosition.pending`), a stop adds those that it prevented, and
the next start does what the files of the run do not show to be done (`zero/run/pending.py`).
The table is `zero/run/feature_table.py`.
"""
