"""How ``make feed-demo`` reads and compares catalogues."""

from pathlib import Path

import pytest

from tests.feed_followers import Catalogue, Known, differing, read_printed, read_ran

THERE = {1: Known(version=10, fingerprint="aa", state="OPEN"), 2: Known(version=20, state="CLOSED")}


@pytest.mark.parametrize(
    ("catalogue", "bad"),
    [
        pytest.param(THERE, [], id="equal"),
        pytest.param({1: Known(version=10), 2: Known(version=20)}, [], id="only versions"),
        pytest.param({1: Known(state="OPEN"), 2: Known(state="CLOSED")}, [], id="only states"),
        pytest.param({2: THERE[2]}, [1], id="a ledger is missing"),
        pytest.param({**THERE, 3: Known(version=5)}, [3], id="a deleted ledger is left"),
        pytest.param({**THERE, 1: Known(version=9)}, [1], id="an earlier version"),
        pytest.param({**THERE, 1: Known(version=10, fingerprint="ab")}, [1], id="other metadata"),
        pytest.param({**THERE, 2: Known(state="OPEN")}, [2], id="another state"),
        pytest.param({}, [1, 2], id="nothing is known"),
    ],
)
def test_each_difference_is_found(catalogue: Catalogue, bad: list[int]) -> None:
    assert differing(catalogue, THERE) == bad


def test_the_last_line_of_a_ledger_counts(tmp_path: Path) -> None:
    printed = tmp_path / "print.log"
    printed.write_text(
        '{"ledger_id": 1, "is_deleted": false, "version": 10, "time_ms": 1}\n'
        "Client print: 2 changed ledgers to handle.\n"
        '{"ledger_id": 2, "is_deleted": false, "version": 11, "time_ms": 1}\n'
        '{"ledger_id": 1, "is_deleted": true, "version": 12, "time_ms": 1}\n'
        '{"ledger_id": 2, "is_del'
    )

    assert read_printed(printed) == ({2: Known(version=11)}, 3)


def test_a_feed_that_goes_back_is_not_accepted(tmp_path: Path) -> None:
    printed = tmp_path / "print.log"
    lines = [
        f'{{"ledger_id": 1, "is_deleted": false, "version": {version}}}\n' for version in (10, 9)
    ]
    printed.write_text("".join(lines))

    with pytest.raises(AssertionError, match="told 0xa before"):
        read_printed(printed)


def test_the_latest_version_of_a_command_counts(tmp_path: Path) -> None:
    ran = tmp_path / "exec.txt"
    ran.write_text("1 0 10\n2 1 12\n2 0 11\n1 0 10\n")

    assert read_ran(ran) == ({1: Known(version=10)}, 4)
