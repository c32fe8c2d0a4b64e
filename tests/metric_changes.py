"""How far metrics moved during a test: the registry is one for the whole process."""

from prometheus_client import REGISTRY


def sample(series: str, **labels: str) -> float:
    """Return the value of a series; 0 if it does not exist yet."""
    return REGISTRY.get_sample_value(f"bookmender_{series}", labels) or 0.0


class Changes:
    """The differences to the values at the beginning."""

    def __init__(self, series: str, label: str, values: tuple[str, ...]) -> None:
        self._series, self._label = series, label
        self._before = {value: self._now(value) for value in values}

    def _now(self, value: str) -> float:
        return sample(self._series, **{self._label: value})

    def __call__(self) -> dict[str, float]:
        """Return, by label value, how far the series moved; without those that did not."""
        moved = {value: self._now(value) - before for value, before in self._before.items()}
        return {value: change for value, change in moved.items() if change}


def changes(series: str, label: str, *values: str) -> Changes:
    """Return a function for the changes of a series from now on, by these values of its label."""
    return Changes(series, label, values)
