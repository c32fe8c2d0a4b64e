"""What ``bookmender local write`` writes."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from daemon.demo.shapes import OPEN_SIZE, Ending, shapes_to_try
from daemon.local.commands import local


@pytest.mark.parametrize("bookie_count", [3, 4, 5])
def test_each_ledger_survives_the_loss_of_a_bookie_with_one_left_to_take_over(
    bookie_count: int,
) -> None:
    made = shapes_to_try(40, open_count=3, bookie_count=bookie_count)

    assert len(made) == 40
    assert all(2 <= shape.write_quorum <= shape.ensemble_size < bookie_count for shape in made)


def test_as_many_are_left_open_as_are_asked_for_with_entries_whatever_their_quorums() -> None:
    made = shapes_to_try(100, open_count=6, bookie_count=5)

    left_open = [shape for shape in made if shape.ending is not Ending.CLOSED]
    assert left_open == made[-6:]
    assert {shape.ending for shape in left_open} == {Ending.ABANDONED}
    assert {(shape.entry_bytes, shape.entry_count) for shape in left_open} == {OPEN_SIZE}
    assert {shape.write_quorum > shape.ack_quorum for shape in left_open} == {True, False}


def test_unless_some_are_asked_for_none_is() -> None:
    made = shapes_to_try(100, open_count=0, bookie_count=5)

    assert {shape.ending for shape in made} == {Ending.CLOSED}


def test_too_few_bookies_are_no_place_to_try_anything() -> None:
    assert shapes_to_try(1, open_count=1, bookie_count=2) == []


def test_more_open_ones_than_there_are_is_a_wrong_call(tmp_path: Path) -> None:
    refused = CliRunner().invoke(
        local, ["write", "--ledgers", "2", "--open", "3", "--data", str(tmp_path)]
    )

    assert refused.exit_code == 2
    assert "--open 3: there are to be 2 --ledgers in all" in refused.stderr
