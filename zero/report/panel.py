"""A panel of report.html."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Panel:
    """A chart.

    Attributes:
      curves: the metric and the name of each.
      is_logarithmic: the y-axis is.
      is_stepped: a value holds since the line before.
      from_zero: the y-axis begins at zero.
      run: the number of the only run that it shows; None for all.
    """

    title: str
    unit: str
    curves: tuple[tuple[str, str], ...]
    is_logarithmic: bool = False
    is_stepped: bool = False
    from_zero: bool = True
    run: int | None = None

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metric of each curve."""
        return tuple(metric for metric, _ in self.curves)
