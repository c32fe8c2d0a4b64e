"""The formats of lists, ``--dry-run``, and the completion scripts."""

import json
from typing import Any

import click
import pytest
import structlog
from click.testing import CliRunner

from daemon.answers import as_json
from daemon.cli import bookie as bookie_command
from daemon.cli import check as check_command
from daemon.cli import ledger as ledger_command
from daemon.cli import plan as plan_command
from daemon.cli import queue as queue_command
from daemon.cli.drain import drain
from daemon.cli.main import cli
from daemon.cli.output import LIST_FORMATS, table_lines, yaml_lines
from daemon.cli.repair import repair
from daemon.logs import set_up_logs
from daemon.operations.plan import RepairPlan, ledger_plan
from daemon.settings import LogSettings
from tests.daemon.cli_calls import exit_code
from tests.daemon.in_memory import run_in_memory
from tests.daemon.test_help import ALL
from tests.daemon.test_json_page import CHECK_ROW, IDLE, PREVIEW, ROW
from tests.replication.cluster import Cluster
from tests.replication.ledger_values import B1, B2
from tests.replication.nodes import LEDGER

LISTS = {
    "bookmender bookie list",
    "bookmender queue list",
    "bookmender plan",
    "bookmender ledger idle",
    "bookmender check list",
    "bookmender config show",
}


async def two_marks(cluster: Cluster) -> None:
    await cluster.mark(B1, ledger_id=3, ctime_ms=0)
    await cluster.mark(B1, B2, ledger_id=70, ctime_ms=1000)


def listed(monkeypatch: pytest.MonkeyPatch, output: str) -> list[str]:
    result, _ = run_in_memory(
        monkeypatch, queue_command, queue_command.list_queue, "-o", output, prepare=two_marks
    )
    return result.stdout.splitlines()


# --- Formats --------------------------------------------------------------------------------------


def test_ids_are_printed_one_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert listed(monkeypatch, "ids") == ["3", "70"]


def test_the_columns_of_a_table_are_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [line.split() for line in listed(monkeypatch, "table")]

    assert rows == [
        ["LEDGER_ID", "MISSING", "CTIME", "IS_PRIVATE", "LOCK_HOLDER", "WAITING_REASON"],
        ["3", B1, "1970-01-01T00:00:00Z", "no", "-", "-"],
        ["70", f"{B1},{B2}", "1970-01-01T00:00:01Z", "no", "-", "-"],
    ]


def test_yaml_has_the_keys_of_json(monkeypatch: pytest.MonkeyPatch) -> None:
    yaml, record = listed(monkeypatch, "yaml"), json.loads("".join(listed(monkeypatch, "json")))

    assert yaml[:4] == ["marked: 2", "ledgers:", "  - ledger_id: 3", "    missing:"]
    assert yaml[4] == f'      - "{B1}"'
    assert len([line for line in yaml if "ledger_id" in line]) == len(record["ledgers"])


@pytest.mark.parametrize(
    ("value", "lines"),
    [
        pytest.param({"a": 1, "b": [1.5, None]}, ["a: 1", "b:", "  - 1.5", "  - null"], id="list"),
        pytest.param([{"a": {"b": True}}], ["- a:", "    b: true"], id="objects in a list"),
        pytest.param({"a": [], "b": {}}, ["a: []", "b: {}"], id="nothing in it"),
        pytest.param({"b1:3181": "no", "no": ""}, ['"b1:3181": "no"', '"no": ""'], id="quoted"),
        pytest.param(["a\nb", "\U0001f600"], ['- "a\\nb"', '- "\U0001f600"'], id="characters"),
        pytest.param([[1, 2]], ["- - 1", "  - 2"], id="lists in a list"),
    ],
)
def test_values_are_written_as_yaml(value: Any, lines: list[str]) -> None:
    assert list(yaml_lines(value)) == lines


def test_a_cell_of_a_table_has_no_blanks() -> None:
    rows = [{"id": 1, "told": [{"why": "two words"}, {"why": "one"}], "is_on": True}]

    assert list(table_lines(rows, ("id", "told.why", "is_on"))) == [
        "ID  TOLD_WHY       IS_ON",
        "1   two_words,one  yes",
    ]


def test_a_table_without_rows_has_its_titles() -> None:
    assert list(table_lines([], ("id", "since_ms"))) == ["ID  SINCE"]


def test_every_list_has_these_formats() -> None:
    formats = {
        name: tuple(param.type.choices)
        for name, command, _ in ALL
        for param in command.params
        if param.name == "output" and isinstance(param.type, click.Choice) and name in LISTS
    }

    assert formats == dict.fromkeys(LISTS, LIST_FORMATS)


@pytest.mark.parametrize("output", LIST_FORMATS)
def test_every_format_of_the_bookies_is_printed(
    monkeypatch: pytest.MonkeyPatch, output: str
) -> None:
    result, _ = run_in_memory(
        monkeypatch, bookie_command, bookie_command.list_bookies, "-o", output, prepare=two_marks
    )

    assert result.exit_code == 0
    assert B1 in result.stdout


@pytest.mark.parametrize(
    ("row", "columns", "ident"),
    [
        pytest.param(ROW.to_json(), bookie_command.COLUMNS, B1, id="bookies"),
        pytest.param(CHECK_ROW.to_json(), check_command.COLUMNS, "all-ledgers", id="checks"),
        pytest.param(
            json.loads(as_json(IDLE)),
            ledger_command.IDLE_COLUMNS,
            str(LEDGER),
            id="idle ledgers",
        ),
        pytest.param(
            json.loads(as_json(ledger_plan(PREVIEW))),
            plan_command.COLUMNS,
            str(LEDGER),
            id="plans",
        ),
    ],
)
def test_the_columns_of_each_table_exist(
    row: dict[str, Any], columns: tuple[str, ...], ident: str
) -> None:
    titles, cells = table_lines([row], columns)

    assert cells.split()[0] == ident
    assert len(titles.split()) == len(cells.split()) == len(columns)


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
        "bookmender ledger close",
        "bookmender ledger restore",
        "bookmender bookie trust-identities",
    }


@pytest.mark.parametrize(
    ("command", "arguments", "planned"),
    [
        pytest.param(repair, ["17", "--dry-run"], ((17,), None), id="repair of a ledger"),
        pytest.param(repair, ["--bookie", B1, "--dry-run"], ((), B1), id="repair of a bookie"),
        pytest.param(drain, [B1, "--dry-run"], ((), B1), id="drain"),
    ],
)
def test_a_dry_run_shows_the_plan(
    monkeypatch: pytest.MonkeyPatch, command: click.Command, arguments: list[str], planned: Any
) -> None:
    asked: list[Any] = []

    async def plan(cluster: object, ledger_ids: object, bookie: object, **_: int) -> RepairPlan:
        asked.append((ledger_ids, bookie))
        return RepairPlan.of([])

    async def nothing(cluster: Cluster) -> None:
        pass

    monkeypatch.setattr(plan_command, "plan_repairs", plan)
    result, _ = run_in_memory(monkeypatch, plan_command, command, *arguments, prepare=nothing)

    assert (result.exit_code, asked) == (0, [planned])
    assert "0 entries to copy" in result.stdout


def test_a_drain_is_planned_for_one_bookie(monkeypatch: pytest.MonkeyPatch) -> None:
    assert exit_code(monkeypatch, "bookie", "drain", B1, B2, "--dry-run") == 2


# --- Completion and colours -----------------------------------------------------------------------


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_gets_its_script(shell: str) -> None:
    result = CliRunner().invoke(cli, ["completion", shell])

    assert result.exit_code == 0
    assert "_BOOKMENDER_COMPLETE" in result.stdout


class Terminal:
    """A stream that says that it is a terminal."""

    def __init__(self) -> None:
        self.written = ""

    def write(self, text: str) -> int:
        self.written += text
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("no_color", "is_coloured"), [("", True), ("1", False)])
def test_logs_have_no_colours_with_no_color(
    monkeypatch: pytest.MonkeyPatch, no_color: str, is_coloured: bool
) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    stream: Any = Terminal()

    set_up_logs(LogSettings(), stream=stream)
    structlog.get_logger().info("an.event")
    structlog.reset_defaults()

    assert "an.event" in stream.written
    assert ("\x1b[" in stream.written) is is_coloured
