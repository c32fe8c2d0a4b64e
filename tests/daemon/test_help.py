"""The output of ``--help`` is short, and docs/json.md describes the JSON of every command."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from daemon.cli.bookie import drain
from daemon.cli.main import CommandGroup, cli
from tests.daemon.cli_calls import exit_code

ROOT = Path(__file__).parents[2]
PROSE_LINES_MAX = 15
WIDTH = 80
OTHER_PAGES = ("fsck",)
"""docs/fsck.md describes these commands."""


def commands(
    group: click.Command = cli, name: str = "bookmender", parent: click.Context | None = None
) -> Iterator[tuple[str, click.Command, click.Context]]:
    """Yield every command and group with its full name."""
    context = click.Context(group, info_name=name, parent=parent, terminal_width=WIDTH)
    yield name, group, context
    if isinstance(group, click.Group):
        for child in group.list_commands(context):
            command = group.get_command(context, child)
            assert command is not None, child
            yield from commands(command, f"{name} {child}", context)


ALL = list(commands())


def is_below(name: str, tops: tuple[str, ...]) -> bool:
    return any(name.split()[1:2] == [top] for top in tops)


@pytest.mark.parametrize(("name", "command", "context"), ALL, ids=[name for name, *_ in ALL])
def test_the_text_of_a_command_is_short(
    name: str, command: click.Command, context: click.Context
) -> None:
    formatter = context.make_formatter()

    command.format_help_text(context, formatter)

    lines = [line for line in formatter.getvalue().splitlines() if line.strip()]
    assert 1 <= len(lines) <= PROSE_LINES_MAX


def test_each_command_is_listed_with_its_whole_first_sentence() -> None:
    sentences = {name: command.get_short_help_str() for name, command, _ in ALL[1:]}
    listed = {
        f"{name} {child}": line
        for name, group, _ in ALL
        if isinstance(group, CommandGroup)
        for child, (_, line) in group.lazy.items()
        if line
    }

    assert {name for name, each in sentences.items() if not re.search(r"[^.]\.$", each)} == set()
    assert listed == {name: sentences[name] for name in listed}


def test_each_command_with_json_output_is_described() -> None:
    page = (ROOT / "docs" / "json.md").read_text()
    described = {
        f"{group} {name}"
        for group, names in re.findall(
            r"^##+ (bookmender(?: [a-z]+)*) ([a-z][a-z-]*(?:, [a-z-]+)*)", page, re.MULTILINE
        )
        for name in names.split(", ")
    }

    with_json = {
        name
        for name, command, _ in ALL
        if any(param.name == "output" for param in command.params)
        and not is_below(name, OTHER_PAGES)
    }

    assert with_json - described == set()


def test_the_list_of_commands_imports_none_of_them() -> None:
    code = (
        "import sys; from daemon.cli.main import cli\n"
        "cli(['--help'], standalone_mode=False)\n"
        "print(*[m for m in sys.modules if m.split('.')[0] in ('structlog', 'kazoo', 'msgspec', "
        "'prometheus_client', 'asyncio', 'replication', 'aiohttp')], file=sys.stderr)"
    )

    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )

    assert ran.stderr == "\n"
    assert "status" in ran.stdout


@pytest.mark.parametrize(
    "arguments",
    [["help", "bookie", "drain"], ["bookie", "drain", "-h"], ["bookie", "drain", "--help"]],
)
def test_help_is_asked_for_in_each_usual_way(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Click keeps the option of the first use, which another test may have made without a group.
    monkeypatch.setattr(drain, "_help_option", None, raising=False)
    assert exit_code(monkeypatch, *arguments) == 0

    assert " bookie drain [OPTIONS]" in capsys.readouterr().out


def test_the_version_is_a_command_and_an_option(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = []
    for name in ("version", "--version"):
        assert exit_code(monkeypatch, name) == 0
        said.append(capsys.readouterr().out)

    assert said[1].endswith(said[0])
