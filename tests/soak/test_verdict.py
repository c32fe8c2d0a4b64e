"""Verdicts on a soak: correct marks, and a node whose memory grows."""

import pytest

from ledgers.model import BookieId
from tests.soak.leaders import growth_bytes_per_s
from tests.soak.verdict import judge

A, B, C = (BookieId(f"{name}:3181") for name in "abc")


@pytest.mark.parametrize(
    ("mark", "lacking", "wrong"),
    [
        pytest.param({A}, {A}, None, id="marked for the lost bookie"),
        pytest.param({A, B}, {A}, None, id="rule S6: a bookie that returned is still named"),
        pytest.param(None, {A}, "unmarked", id="not marked"),
        pytest.param({B}, {A}, "unmarked", id="marked only for another one"),
        pytest.param({A}, None, "surplus", id="marked though it misses nothing"),
        pytest.param({A, C}, {A}, "false_replicas", id="marked for a bookie that was never absent"),
    ],
)
def test_marks_are_right_if_they_name_the_lost_bookies(
    mark: set[BookieId] | None, lacking: set[BookieId] | None, wrong: str | None
) -> None:
    verdict = judge(
        {} if mark is None else {7: frozenset(mark)},
        {} if lacking is None else {7: frozenset(lacking)},
        ever_absent={A, B},
    )

    faults = {name for name in ("unmarked", "surplus", "false_replicas") if getattr(verdict, name)}
    assert faults == ({wrong} if wrong else set())
    assert verdict.is_right is (wrong is None)


def test_a_verdict_names_ledgers() -> None:
    verdict = judge({8: frozenset({A})}, {7: frozenset({A})}, ever_absent={A})

    assert verdict.to_text() == "not marked: 1, such as 7; marked for nothing: 1, such as 8"


def test_growth_is_the_slope_of_all_samples() -> None:
    samples = [(0.0, 100), (10.0, 130), (20.0, 120), (30.0, 150)]

    assert growth_bytes_per_s(samples) == pytest.approx(1.4)
    assert growth_bytes_per_s(samples[:1]) == 0
