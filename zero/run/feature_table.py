"""The table of features, in the order in which they act after a step (`zero.run.features` has the reasons)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import MappingProxyType

from zero.config.saved_config import flat_config
from zero.run.config import TrainConfig, default_config
from zero.run.feature import Feature
from zero.run.features.bar import Bar
from zero.run.features.export import Export
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
from zero.run.run import Run

# Constructs each feature from the sections that it reads and the run.
FEATURES: Mapping[type[Feature], Callable[[TrainConfig, Run], Feature]] = MappingProxyType(
    {
        # measure
        Profile: lambda config, run: Profile(config.profile, run),
        Statistics: lambda config, run: Statistics(config.statistics, run),
        Verify: lambda config, run: Verify(config.verify, run),
        Limits: lambda config, run: Limits(config.training, config.training, config.data),
        Validate: lambda config, run: Validate(config.training, config.training, run),
        Harness: lambda config, run: Harness(config.harness, run),
        # show the line
        Track: lambda config, run: Track(config.training, config.data, run),
        Bar: lambda config, run: Bar(run),
        Largest: lambda config, run: Largest(),
        # act on it
        Save: lambda config, run: Save(config.data, config.zero, run),
        Protect: lambda config, run: Protect(config.zero, run),
        Sample: lambda config, run: Sample(config.training, run),
        Report: lambda config, run: Report(flat_config(default_config())),
        Export: lambda config, run: Export(config.export, run),
    }
)


@contextmanager
def open_features(config: TrainConfig, run: Run) -> Iterator[list[Feature]]:
    """The features of a run in the order of their table; closed in reverse order."""
    with ExitStack() as stack:
        features: list[Feature] = []
        for make in FEATURES.values():
            feature = make(config, run)
            stack.callback(feature.close)
            features.append(feature)
        yield features
