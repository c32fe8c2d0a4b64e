"""``bookmender health explain``, and docs/status.md."""

import json
import re
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from daemon.cli.main import cli
from daemon.http.records import LeaderStateRecord
from daemon.status.conditions import Code
from daemon.status.explanations import EXPLANATIONS, explain
from daemon.status.report import to_json
from tests.daemon.status_values import HEALTHY, changed
from tests.replication.ledger_values import B1

DOC = Path(__file__).parents[2] / "docs" / "status.md"


@pytest.mark.parametrize("code", Code)
def test_every_code_is_explained_in_a_few_lines(code: Code) -> None:
    lines = explain(code).splitlines()

    assert 5 <= len(lines) <= 12
    assert lines[0] == f"{code}: {EXPLANATIONS[code].severity}"
    for part in ("Meaning: ", "Causes: ", "Do: ", "Clears: "):
        assert any(line.startswith(part) for line in lines)


def test_explanations_are_in_the_order_of_the_codes() -> None:
    assert list(EXPLANATIONS) == list(Code)


@pytest.mark.parametrize("spelling", ["NO_AUDITOR", "no_auditor", "no-auditor"])
def test_a_code_is_explained(spelling: str) -> None:
    result = CliRunner().invoke(cli, ["health", "explain", spelling])

    assert result.exit_code == 0
    assert result.output == f"{explain(Code.NO_AUDITOR)}\n"


def test_without_a_code_all_are_listed() -> None:
    result = CliRunner().invoke(cli, ["health", "explain"])

    assert [line.split()[0] for line in result.output.splitlines()] == list(Code)


def test_an_unknown_code_is_wrong_usage_and_names_the_nearest() -> None:
    result = CliRunner().invoke(cli, ["health", "explain", "BOOKIE_LOST"])

    assert result.exit_code == 2
    assert "Did you mean BOOKIES_LOST?" in result.output


def test_the_help_of_status_is_short() -> None:
    result = CliRunner().invoke(cli, ["status", "--help"])

    assert len(result.output.splitlines()) <= 15
    assert "docs/status.md" in result.output


# --- docs/status.md -------------------------------------------------------------------------------


def test_the_page_lists_every_code_with_its_severity_and_meaning() -> None:
    table = DOC.read_text().partition("## Conditions")[2].partition("## JSON")[0]
    rows = re.findall(r"^\| `([A-Z_]+)` \| (.+) \| (.+) \|$", table, re.MULTILINE)

    assert rows == [(code.value, it.severity, it.summary) for code, it in EXPLANATIONS.items()]


def test_the_page_describes_every_key_of_the_json() -> None:
    record = to_json(changed(HEALTHY, lost=(B1,)))
    keys = {
        *record,
        *record["conditions"][0],
        *record["bookies"],
        *record["queue"],
        *record["waiting"],
        *record["leader_state"],
        *record["copying"],
    }

    assert json.dumps(record)
    assert {key for key in keys if f"`{key}`" not in DOC.read_text()} == set()


def test_the_page_describes_every_nested_key_of_the_leaders_state() -> None:
    """The tests of the API compare these types with real answers."""
    _, types = msgspec.json.schema_components([LeaderStateRecord])
    keys = {key for each in types.values() for key in each["properties"]}

    assert {key for key in keys if f"`{key}`" not in DOC.read_text()} == set()
