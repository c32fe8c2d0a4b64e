"""Option types shared by several commands: durations, folders, reasons, limits."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from daemon.cli.paths import LocalPath
from daemon.words import printable
from replication.orders import LIMIT_RANGES

SECONDS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
DURATION_PATTERN = "(?:[0-9]+[smhd])+"
DURATION_MAX_S = 30 * 86_400
"""Longest maintenance window. The bookie's ledgers lack a copy for all that time."""
DIGITS_MAX = 9
"""Numbers with more digits are too long in any unit."""
SHOWN_MAX = 40
"""Characters shown of a wrong duration."""
REASON_LENGTH_MAX = 200
UNLIMITED = "none"


class Duration(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.5 on only
    """A duration such as ``90s``, ``30m``, ``2h``, ``1d`` or ``1h30m``, converted to seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return parse_duration_s(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def parse_duration_s(text: str) -> int:
    """Return the seconds of a duration such as ``1h30m``. Raises ValueError with a sentence."""
    shown = text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}…"
    if not re.fullmatch(DURATION_PATTERN, text):
        raise ValueError(f"{shown!r} is not a duration. Examples: 90s, 30m, 2h, 1h30m, 1d.")
    parts = re.findall("0*([0-9]+)([smhd])", text)
    duration_s = sum(int(number[:DIGITS_MAX]) * SECONDS[unit] for number, unit in parts)
    if any(len(number) > DIGITS_MAX for number, _ in parts) or duration_s > DURATION_MAX_S:
        raise ValueError(f"{shown!r} is too long. The longest duration is 30d.")
    if not duration_s:
        raise ValueError(f"{shown!r} is too short. The shortest duration is 1s.")
    return duration_s


class Folder(LocalPath):
    """An option type: a folder, as an absolute path.

    An empty value is refused, because it usually comes from a variable that is not set.
    """

    def __init__(self) -> None:
        super().__init__(file_okay=False, resolve_path=True, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("the value is empty: name a folder, or . for the current one", param, ctx)
        return super().convert(value, param, ctx)


class ReasonText(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.5 on only
    """One line of printable text."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        assert isinstance(value, str)
        if not value.isprintable():
            self.fail(f"'{printable(value)}' contains control characters.", param, ctx)
        if len(value) > REASON_LENGTH_MAX:
            self.fail(
                f"The text has {len(value)} characters. At most {REASON_LENGTH_MAX} are allowed.",
                param,
                ctx,
            )
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
            self.fail(f"{value!r} is not a {self._allowed}", param, ctx)
        number = int(digits) * factor
        if not self.least <= number <= self.most:
            self.fail(f"{number} is not a {self._allowed}", param, ctx)
        return number

    @property
    def _allowed(self) -> str:
        example = " Examples: 20000000, 20M." if self.most >= self.factors["M"] else ""
        return f"whole number from {self.least} to {self.most}.{example}"
