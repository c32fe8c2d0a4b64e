"""The formats of lists: text for people, a table, JSON, YAML, or one ID a line for ``xargs``."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import click

from daemon.cli.main import note_output
from daemon.words import printable

LIST_FORMATS = ("text", "table", "json", "yaml", "ids")

list_output_option = click.option(
    "-o",
    "--output",
    type=click.Choice(LIST_FORMATS),
    default="text",
    show_default=True,
    is_eager=True,  # so that errors about other arguments are printed in this format, too
    callback=note_output,
    help="Format; ids: one ID a line.",
)


def echo_list(
    output: str,
    record: Mapping[str, Any],
    *,
    rows: str,
    columns: Sequence[str],
    text: Callable[[], str],
) -> None:
    """Print a list in the format ``output``.

    ``record``: what JSON and YAML print. ``rows``: the key of the list in it. ``columns``: the
    columns of the table, as paths such as ``lock.holder``; the first one is the ID.
    """
    listed: Sequence[Mapping[str, Any]] = record[rows]
    match output:
        case "json":
            click.echo(json.dumps(record, indent=2))
        case "yaml":
            click.echo("\n".join(yaml_lines(record)))
        case "ids":
            for row in listed:
                click.echo(printable(str(row[columns[0]])))
        case "table":
            click.echo("\n".join(table_lines(listed, columns)))
        case _:
            click.echo(text())


# --- Tables ---------------------------------------------------------------------------------------


def table_lines(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> Iterator[str]:
    """Yield the lines of a table: a line of titles, and a line for each row.

    Cells have no blanks, so ``awk`` finds the columns. ``-``: unknown, or none.
    """
    cells = [[_title(column) for column in columns]]
    cells += [[_cell(_at(row, column), column) for column in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        padded = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        yield "  ".join(padded).rstrip()


def _title(column: str) -> str:
    return column.removesuffix("_ms").replace(".", "_").upper()


def _at(value: Any, path: str) -> Any:
    """Return the value at the path; of a list, the values of its elements."""
    for name in path.split("."):
        if isinstance(value, list):
            value = [each[name] for each in value]
        elif value is not None:
            value = value[name]
    return value


def _cell(value: Any, column: str) -> str:
    match value:
        case None | [] | "":
            return "-"
        case bool():
            return "yes" if value else "no"
        case list():
            return ",".join(_cell(each, column) for each in value)
        case int() if column.endswith("_ms"):
            return datetime.fromtimestamp(value / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        case _:
            return re.sub(r"\s+", "_", printable(str(value)))


# --- YAML -----------------------------------------------------------------------------------------


def yaml_lines(value: Any) -> Iterator[str]:
    """Yield the lines of the value as YAML, in blocks. Scalars are written as in JSON, which is a
    part of YAML."""
    match value:
        case dict() if value:
            for key, inner in value.items():
                yield from _entry(f"{_key(key)}:", inner)
        case list() if value:
            for inner in value:
                yield from _entry("-", inner)
        case _:
            yield _scalar(value)


def _entry(head: str, value: Any) -> Iterator[str]:
    lines = list(yaml_lines(value))
    if not isinstance(value, (dict, list)) or not value:
        yield f"{head} {lines[0]}"
    elif head == "-":
        yield f"- {lines[0]}"
        yield from (f"  {line}" for line in lines[1:])
    else:
        yield head
        yield from (f"  {line}" for line in lines)


_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_RESERVED = {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}


def _key(key: str) -> str:
    if _PLAIN_KEY.fullmatch(key) and key.lower() not in _RESERVED:
        return key
    return _scalar(key)


def _scalar(value: Any) -> str:
    # Characters that YAML forbids are escaped. Others are not, because JSON escapes characters
    # beyond U+FFFF as two surrogates, and YAML does not know these.
    is_printable = not isinstance(value, str) or value.isprintable()
    return json.dumps(value, ensure_ascii=not is_printable)
