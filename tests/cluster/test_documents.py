"""The documents' commands exist, and those in code blocks work as printed."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from daemon.cli.main import cli

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    *(ROOT / f"{name}.md" for name in ("README", "ARCHITECTURE", "CONTRIBUTING", "SECURITY")),
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "bench" / "README.md",
]
FENCED = re.compile(r"^ *```\w*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


def commands_in(text: str) -> Iterator[str]:
    """Yield the arguments of each ``bookmender`` in code: `in backticks`, and in blocks."""
    inline = re.findall(r"`([^`]+)`", FENCED.sub("", text))
    for code in (*inline, *lines_of_blocks(text)):
        if found := re.match(r"\s*(?:[\w/.]+/)?bookmender +([a-z-].*)", code, re.DOTALL):
            yield " ".join(found[1].split())


def lines_of_blocks(text: str) -> list[str]:
    """Return the lines of the code blocks. Those that are continued are joined."""
    blocks = FENCED.findall(text)
    return [line.strip() for b in blocks for line in re.sub(r"\\\n\s*", "", b).splitlines()]


def wrong_in(line: str) -> str:
    """Return what is wrong with these arguments of ``bookmender``; empty if they exist."""
    arguments = shlex.split(re.split(r"[|>]|&&|;", line)[0], comments=True)
    command: click.Command = cli
    context = click.Context(cli, info_name="bookmender")
    try:
        while True:
            given, arguments, _ = command.make_parser(context).parse_args(arguments)
            for param in command.params:
                value = given.get(param.name or "")
                if (
                    isinstance(param.type, click.Choice)
                    and isinstance(value, str)
                    and value.islower()
                ):
                    param.type.convert(value, param, context)
            if not isinstance(command, click.Group) or not arguments:
                return f"too many: {arguments}" if arguments else ""
            name, found, arguments = command.resolve_command(context, arguments)
            assert found is not None
            command, context = found, click.Context(found, info_name=name, parent=context)
    except click.ClickException as error:
        return error.format_message()


@pytest.mark.parametrize(
    ("line", "is_wrong"),
    [
        pytest.param("bookie drain ID1 ID2 --wait", False, id="placeholders"),
        pytest.param("ledger show", False, id="without its arguments"),
        pytest.param("status -o json | jq .health # comment", False, id="within a pipe"),
        pytest.param("status --explain-all", True, id="no such option"),
        pytest.param("status -o yaml", True, id="no such value"),
        pytest.param("queue list", True, id="a name of an earlier release"),
    ],
)
def test_wrong_commands_are_found(line: str, is_wrong: bool) -> None:
    assert bool(wrong_in(line)) is is_wrong


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_that_a_document_names_exists(document: Path) -> None:
    found = {line: wrong for line in commands_in(document.read_text()) if (wrong := wrong_in(line))}

    assert found == {}
