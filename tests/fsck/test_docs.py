"""``docs/fsck.md`` agrees with the code, and is complete."""

import re
from collections.abc import Iterable
from pathlib import Path

import click
import pytest

from auditor.fsck.options import Level
from auditor.fsck.results.rows import SCHEMA
from auditor.fsck.verdicts import Finding, Grade, LedgerVerdict
from daemon.cli.fsck import fsck
from tests.fsck.results import damaged, seen

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "fsck.md").read_text()
SPARK_SUBMITS = {"--deploy-mode", "--archives", "--conf"}


def rows(heading: str) -> dict[str, list[str]]:
    """Return the cells of the tables below a heading, by the first cell."""
    part = TEXT.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("| `")]
    return {name: cells for first, *cells in lines for name in re.findall("`([^`]+)`", first)}


@pytest.mark.parametrize(
    ("heading", "names"),
    [
        pytest.param("Levels", [level.value for level in Level], id="levels"),
        pytest.param("Verdicts", [each.value for each in (*Grade, *Finding)], id="verdicts"),
        pytest.param("Results", SCHEMA.names, id="columns"),
    ],
)
def test_the_page_describes_all_levels_verdicts_and_columns(
    heading: str, names: Iterable[str]
) -> None:
    assert set(names) <= rows(heading).keys()


@pytest.mark.parametrize("finding", list(Finding), ids=lambda finding: finding.value)
def test_the_page_agrees_on_which_findings_are_wrong(finding: Finding) -> None:
    grade = Grade.WHOLE if finding is Finding.SUSPECT else Grade.DEGRADED
    verdict: LedgerVerdict = damaged(1, grade, seen(finding))

    said = rows("Verdicts")[finding.value][-1]

    assert (said == "yes") is verdict.is_wrong


def test_the_page_names_existing_options_and_all_of_run() -> None:
    found = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", TEXT)) - SPARK_SUBMITS
    options = {
        name: {
            text
            for param in command.params
            if isinstance(param, click.Option) and not param.hidden
            for text in param.opts
        }
        for name, command in fsck.commands.items()
        if isinstance(command, click.Command)
    }

    assert found <= set().union(*options.values())
    long = {text for text in options["run"] if text.startswith("--")}
    assert long - found <= {"--config", "--json", "--help"}
