"""``bookmender status --explain``."""

import pytest
from click.testing import CliRunner

from daemon.cli.main import cli
from daemon.status.conditions import CONDITIONS
from replication.reasons import Reason


@pytest.mark.parametrize("code", CONDITIONS)
def test_every_code_is_explained_in_a_few_lines(code: str) -> None:
    lines = CONDITIONS[code].to_text().splitlines()

    assert 5 <= len(lines) <= 13
    assert lines[0] == f"{code}: {CONDITIONS[code].severity}"
    for part in ("Meaning: ", "Causes: ", "Do: ", "Clears: "):
        assert any(line.startswith(part) for line in lines)


def test_blocked_repairs_are_explained_for_every_reason_that_needs_help() -> None:
    causes = CONDITIONS["REPAIRS_BLOCKED"].causes

    assert [r.value for r in Reason if r.needs_help and r.value not in causes] == []


@pytest.mark.parametrize("spelling", ["NO_AUDITOR", "no_auditor", "no-auditor"])
def test_a_code_is_explained(spelling: str) -> None:
    result = CliRunner().invoke(cli, ["status", "--explain", spelling])

    assert result.exit_code == 0
    assert result.output == f"{CONDITIONS['NO_AUDITOR'].to_text()}\n"


def test_without_a_code_all_are_listed() -> None:
    result = CliRunner().invoke(cli, ["status", "--explain"])

    assert [line.split()[0] for line in result.output.splitlines()] == list(CONDITIONS)


def test_an_unknown_code_is_wrong_usage_and_names_the_nearest() -> None:
    result = CliRunner().invoke(cli, ["status", "--explain", "BOOKIE_LOST"])

    assert result.exit_code == 2
    assert "Did you mean BOOKIES_LOST?" in result.output
