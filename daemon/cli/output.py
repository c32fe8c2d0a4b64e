"""The formats of lists: text for people, JSON, or one ID a line for ``xargs``."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import click
import msgspec

from daemon.answers import Answer, as_json
from daemon.cli.main import F, config_option, format_option
from daemon.words import printable

LIST_FORMATS = ("text", "json", "ids")
GONE = {"yaml": "-o json | yq -P", "table": "-o text, or -o json | jq"}
"""Formats of earlier releases, and what to use instead."""


class ListFormat(click.Choice[str]):
    """The option type of the format of a list."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value in GONE:
            self.fail(f"{value!r} is no format any more. Use: {GONE[value]}", param, ctx)
        return super().convert(value, param, ctx)


_list_format_option = format_option(
    "-o", "--output", kind=ListFormat(LIST_FORMATS), about="Format; ids: one ID a line."
)


def list_options(command: F) -> F:
    """Add ``-c`` and ``-o`` to a command that prints a list."""
    return config_option(_list_format_option(command))


def echo(output: str, answer: Answer | Mapping[str, Any], text: str) -> None:
    """Print an answer as JSON, or the text."""
    click.echo(as_json(answer) if output == "json" else text)


def echo_list(
    output: str, record: Answer | Mapping[str, Any], *, rows: str, text: Callable[[], str]
) -> None:
    """Print a list in the format ``output``.

    ``record``: what JSON prints. ``rows``: the key of the list in it. The first key of each row is
    its ID.
    """
    if output == "json":
        click.echo(as_json(record))
    elif output == "ids":
        for row in msgspec.to_builtins(record)[rows]:
            click.echo(printable(str(next(iter(row.values())))))
    else:
        click.echo(text())


def table(rows: Sequence[Mapping[str, str]], *, numbers: Collection[str] = ()) -> list[str]:
    """Return aligned columns below their names, without columns that are empty in all rows.

    ``rows``: texts by column, which may be foreign. ``numbers``: columns that are aligned at the
    right.
    """
    names = [name for name in (rows[0] if rows else ()) if any(row[name] for row in rows)]
    lines = [names, *([printable(row[name]) or "-" for name in names] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if name in numbers else cell.ljust(width)
            for name, cell, width in zip(names, line, widths, strict=True)
        ).rstrip()
        for line in lines
        if names
    ]
