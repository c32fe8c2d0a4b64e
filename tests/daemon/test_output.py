"""The formats of lists, ``--dry-run``, and the completion scripts."""

import click
import pytest
from click.testing import CliRunner

from daemon.cli import bookie as bookie_command
from daemon.cli import queue as queue_command
from daemon.cli.main import cli
from daemon.cli.output import GONE, LIST_FORMATS
from tests.daemon.cli_calls import exit_code
from tests.daemon.in_memory import InMemory
from tests.daemon.test_help import ALL
from tests.replication.cluster import Cluster
from tests.replication.ledger_values import B1, B2

LISTS = {
    "bookmender bookie list",
    "bookmender queue",
    "bookmender plan",
    "bookmender ledger idle",
    "bookmender check",
    "bookmender config show",
}


async def two_marks(cluster: Cluster) -> None:
    await cluster.mark(B1, ledger_id=3, ctime_ms=0)
    await cluster.mark(B1, B2, ledger_id=70, ctime_ms=1000)


def test_ids_are_printed_one_a_line(in_memory: InMemory) -> None:
    result, _ = in_memory(queue_command.queue, "-o", "ids", prepare=two_marks)

    assert result.stdout.splitlines() == ["3", "70"]


@pytest.mark.parametrize("output", GONE)
def test_earlier_formats_are_answered_with_what_to_use(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], output: str
) -> None:
    assert exit_code(monkeypatch, "bookie", "list", "-o", output) == 2
    assert GONE[output] in capsys.readouterr().err


def test_every_list_has_these_formats() -> None:
    formats = {
        name: tuple(param.type.choices)
        for name, command, _ in ALL
        for param in command.params
        if param.name == "output" and isinstance(param.type, click.Choice) and name in LISTS
    }

    assert formats == dict.fromkeys(LISTS, LIST_FORMATS)


@pytest.mark.parametrize("output", LIST_FORMATS)
def test_every_format_of_the_bookies_is_printed(in_memory: InMemory, output: str) -> None:
    result, _ = in_memory(bookie_command.list_bookies, "-o", output, prepare=two_marks)

    assert result.exit_code == 0
    assert B1 in result.stdout


# --- --dry-run ------------------------------------------------------------------------------------


def test_what_waits_for_yes_takes_dry_run() -> None:
    """Without ``--yes`` these commands only show. ``--dry-run`` is another name for that."""
    both = {
        name
        for name, command, _ in ALL
        for param in command.params
        if param.name == "yes" and param.secondary_opts == ["--dry-run"]
    }

    assert both == {
        "bookmender archive restore clone",
        "bookmender archive restore cluster",
        "bookmender archive restore ledger",
        "bookmender ledger close",
        "bookmender ledger restore",
        "bookmender bookie trust-identities",
    }


# --- Completion -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_gets_its_script(shell: str) -> None:
    result = CliRunner().invoke(cli, ["completion", shell])

    assert result.exit_code == 0
    assert "_BOOKMENDER_COMPLETE" in result.stdout
