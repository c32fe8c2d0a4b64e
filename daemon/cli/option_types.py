"""Option types shared by several commands: bookies, durations, folders, reasons, limits."""

import asyncio
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from daemon.cli.paths import LocalPath
from daemon.settings_source import find_source
from daemon.words import REASON_LENGTH_MAX, parse_duration_s, printable
from ledgers.codec.registration import parse_bookie_id
from ledgers.errors import BookmenderError, CorruptionError
from ledgers.model import BookieId
from replication.orders import LIMIT_RANGES

UNLIMITED = "none"


class Duration(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.5 on only
    """A duration such as ``90s``, ``30m``, ``2h``, ``1d`` or ``1h30m``, converted to seconds."""

    name = "duration"

    def __init__(self, *, least_s: int = 1) -> None:
        self.least_s = least_s

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return parse_duration_s(value, least_s=self.least_s)
        except ValueError as error:
            self.fail(str(error), param, ctx)


COMPLETION_TIMEOUT_S = 2.0
"""Time limit for completions. A shell that blocks for longer is a nuisance."""


class BookieArgument(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.5 on only
    """A bookie ID. Shells complete it from the cluster that the settings name."""

    name = "bookie id"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> BookieId:
        try:
            return parse_bookie_id(value)
        except CorruptionError:
            self.fail(f"{value!r} is not a bookie ID. Example: 10.0.0.1:3181", param, ctx)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        try:
            bookies = _completions(ctx.params.get("config"))
        except (BookmenderError, OSError, TimeoutError):
            return []
        return [CompletionItem(b) for b in sorted(bookies) if b.startswith(incomplete)]


def _completions(config: Path | None) -> Collection[BookieId]:
    from daemon.admin_session import admin_session
    from daemon.cli.session import log_errors_only
    from daemon.operations.bookies import known_bookies

    settings = find_source(config, os.environ).load()
    log_errors_only(settings)  # log lines must not appear among the completions

    async def look() -> Collection[BookieId]:
        async with asyncio.timeout(COMPLETION_TIMEOUT_S), admin_session(settings) as cluster:
            return await known_bookies(cluster)

    return asyncio.run(look())


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
    factors: Mapping[str, int] = {"k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9}

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
