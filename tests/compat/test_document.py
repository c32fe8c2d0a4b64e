"""The compatibility page and its faults, from a small catalogue and given evidence."""

from pathlib import Path

import pytest

from tests.compat.catalogue import Row, load_catalogue
from tests.compat.document import faults, page, report
from tests.compat.evidence import Claim, Verdict, Witness

ANYWHERE = Row(
    part="replication", group="TestX", title="testOne", about="One | thing", needs_bookie=False
)
ON_BOOKIES = Row(part="replication", group="Gaps", title="G99", about="Another", needs_bookie=True)


def witness(
    *rows: str,
    test: str = "test_it_works",
    parameters: str = "",
    verdict: Verdict = "same",
    why: str = "",
    is_on_bookies: bool = False,
    outcome: str | None = "passed",
) -> Witness:
    return Witness(
        file="tests/test_x.py",
        test=test,
        parameters=parameters,
        is_on_bookies=is_on_bookies,
        claims=(Claim(rows=rows, verdict=verdict, why=why),),
        outcome=outcome,
    )


ONE = witness("TestX.testOne")


@pytest.mark.parametrize(
    ("row", "witnesses", "found"),
    [
        pytest.param(ANYWHERE, [ONE], [], id="a passing test"),
        pytest.param(ANYWHERE, [], ["TestX.testOne: no test shows it"], id="no test"),
        pytest.param(
            ANYWHERE,
            [ONE, witness("TestX.testTwo")],
            ["tests/test_x.py::test_it_works: there is no row TestX.testTwo"],
            id="a mistyped name",
        ),
        pytest.param(
            ANYWHERE,
            [ONE, witness("TestX.testOne", verdict="better", why="sooner")],
            ["TestX.testOne: its tests do not agree on better or same"],
            id="two opinions",
        ),
        pytest.param(
            ANYWHERE,
            [witness("TestX.testOne", verdict="other")],
            ["TestX.testOne: none of its tests says why ours does not do the same"],
            id="different without a reason",
        ),
        pytest.param(
            ON_BOOKIES,
            [witness("G99")],
            [
                "G99: its tests run on fakes, where only a real bookie proves anything",
                "G99: none of its tests on real bookies passed",
            ],
            id="on fakes only",
        ),
        pytest.param(
            ON_BOOKIES,
            [witness("G99"), witness("G99", is_on_bookies=True, outcome="skipped")],
            ["G99: none of its tests on real bookies passed"],
            id="the one on bookies was skipped",
        ),
        pytest.param(
            ON_BOOKIES,
            [witness("G99"), witness("G99", is_on_bookies=True)],
            [],
            id="also on bookies",
        ),
        pytest.param(
            ANYWHERE,
            [ONE, witness("TestX.testOne", parameters="b", outcome="failed")],
            ["TestX.testOne: tests/test_x.py::test_it_works[b] failed"],
            id="one of several fails",
        ),
        pytest.param(
            ANYWHERE,
            [witness("TestX.testOne", outcome=None)],
            [
                "TestX.testOne: tests/test_x.py::test_it_works did not run",
                "TestX.testOne: none of its tests passed",
            ],
            id="never run",
        ),
    ],
)
def test_faults_of_a_row_are_found(row: Row, witnesses: list[Witness], found: list[str]) -> None:
    assert faults([row], witnesses, has_run=True) == found


def test_without_a_run_only_the_markers_count() -> None:
    assert faults([ANYWHERE], [witness("TestX.testOne", outcome=None)], has_run=False) == []


def test_the_report_has_each_row_with_reasons_and_links() -> None:
    witnesses = [
        witness("TestX.testOne", parameters="b", verdict="better", why="sooner", outcome=None),
        witness("TestX.testOne", parameters="a", verdict="better", why="sooner"),
        witness("TestX.testOne", test="test_another", verdict="better", is_on_bookies=True),
    ]

    shown = report([ANYWHERE], witnesses)

    assert "1 rows: 0 same, 1 better, 0 different on purpose. 1 are shown on real" in shown
    assert shown.splitlines()[-1] == (
        "| testOne | One \\| thing | **better**: sooner "
        "| ● [another](../tests/test_x.py)<br>[it works](../tests/test_x.py) |"
    )


def test_the_page_has_counts_and_what_differs() -> None:
    witnesses = [
        witness("TestX.testOne", verdict="other", why="on purpose"),
        witness("G99", is_on_bookies=True),
    ]

    shown = page([ANYWHERE, ON_BOOKIES], witnesses)

    assert "| replication: tests | 1 | 0 | 0 | 1 | 0 |" in shown
    assert "| replication: gaps | 1 | 1 | 0 | 0 | 1 |" in shown
    assert shown.splitlines()[-1] == "| One \\| thing | on purpose |"


def test_the_report_does_not_depend_on_the_order_of_tests() -> None:
    witnesses = [witness("G99", test=f"test_{name}") for name in "cab"]

    assert report([ON_BOOKIES], witnesses) == report([ON_BOOKIES], witnesses[::-1])


def test_rows_are_read_from_every_part(tmp_path: Path) -> None:
    (tmp_path / "replication.toml").write_text(
        '[Gaps]\nG8 = { about = "a" }\n[TestX]\ntestOne = { about = "b", bookie = true }\n'
    )
    (tmp_path / "auditor.toml").write_text('[TestY]\ntestTwo = { about = "c" }\n')

    rows = load_catalogue(tmp_path)

    assert [(row.part, row.name, row.needs_bookie) for row in rows] == [
        ("auditor", "TestY.testTwo", False),
        ("replication", "G8", False),
        ("replication", "TestX.testOne", True),
    ]
