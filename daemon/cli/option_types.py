"""Option types shared by several commands: durations, reasons, limits."""

import re
from collections.abc import Mapping
from typing import Any

import click

from daemon.cli.progress import printable
from replication.orders import LIMIT_RANGES

SECONDS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
DURATION_MAX_S = 30 * 86_400
"""Longest maintenance window. The bookie's ledgers lack a copy for all that time."""
REASON_LENGTH_MAX = 200
UNLIMITED = "none"


class Duration(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.5 on only
    """A duration such as ``90s``, ``30m``, ``2h``, ``1d`` or ``1h30m``, converted to seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        parts = re.findall(r"([0-9]{1,9})([smhd])", value)
        if not parts or "".join(number + unit for number, unit in parts) != value:
            self.fail(f"{value!r} is no duration, as in 90s, 30m, 2h, 1h30m or 1d", param, ctx)
        duration_s = sum(int(number) * SECONDS[unit] for number, unit in parts)
        if not 0 < duration_s <= DURATION_MAX_S:
            self.fail(f"{value!r} is not between 1 second and 30 days", param, ctx)
        return duration_s


class ReasonText(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.5 on only
    """One line of printable text."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        assert isinstance(value, str)
        if not value.isprintable():
            self.fail(f"'{printable(value)}' has characters that are no text", param, ctx)
        if len(value) > REASON_LENGTH_MAX:
            self.fail(f"at most {REASON_LENGTH_MAX} characters, not {len(value)}", param, ctx)
        return value


class Limit(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.5 on only
    """A number within the range of a limit, such as 20000000 or 20M. 0 or ``none`` mean no limit,
    where allowed."""

    name = "number"
    factors: Mapping[str, int] = {"k": 10**3, "M": 10**6, "G": 10**9}

    def __init__(self, key: str) -> None:
        self.least, self.most = LIMIT_RANGES[key]

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        if value == UNLIMITED and self.least == 0:
            return 0
        digits, factor = value, 1
        if value[-1:] in self.factors:
            digits, factor = value[:-1], self.factors[value[-1]]
        if not re.fullmatch(r"[0-9]{1,18}", digits):
            self.fail(f"{value!r} is no {self._allowed}", param, ctx)
        number = int(digits) * factor
        if not self.least <= number <= self.most:
            self.fail(f"{number} is no {self._allowed}", param, ctx)
        return number

    @property
    def _allowed(self) -> str:
        example = ", as in 20000000 or 20M" if self.most >= self.factors["M"] else ""
        return f"whole number from {self.least} to {self.most}{example}"
