"""The grade of one entry, from the state of its copies."""

import itertools

import pytest

from auditor.fsck.verdicts import EntryCopies, Grade

LOST, AT_RISK, DEGRADED, UNKNOWN, WHOLE = Grade


def grade(write_quorum: int = 3, ack_quorum: int = 2, **copies: int) -> Grade:
    return EntryCopies(
        write_quorum=write_quorum,
        ack_quorum=ack_quorum,
        **copies,  # type: ignore[arg-type]
    ).grade


@pytest.mark.parametrize(
    ("write_quorum", "bad", "expected"),
    [
        (3, 0, WHOLE),
        (3, 1, DEGRADED),
        (3, 2, AT_RISK),
        (3, 3, LOST),
        (2, 1, AT_RISK),
        (2, 2, LOST),
        (1, 0, WHOLE),
        (1, 1, LOST),
        (5, 3, DEGRADED),
        (5, 4, AT_RISK),
    ],
)
def test_the_grade_follows_from_the_number_of_bad_copies(
    write_quorum: int, bad: int, expected: Grade
) -> None:
    assert grade(write_quorum, 1, bad=bad) is expected


@pytest.mark.parametrize(
    ("copies", "expected"),
    [
        ({"unanswered": 1}, UNKNOWN),
        ({"unanswered": 3}, UNKNOWN),
        # Known damage gives the least grade.
        ({"unanswered": 1, "bad": 1}, DEGRADED),
        ({"unanswered": 2, "bad": 1}, DEGRADED),
        ({"unanswered": 1, "bad": 2}, AT_RISK),
    ],
)
def test_an_unanswered_read_is_not_a_missing_copy(copies: dict[str, int], expected: Grade) -> None:
    assert grade(**copies) is expected


@pytest.mark.parametrize(
    ("copies", "expected"),
    [
        ({"on_absent": 1}, DEGRADED),
        ({"on_absent": 2}, AT_RISK),
        ({"on_absent": 3}, UNKNOWN),
        ({"on_absent": 1, "bad": 1}, AT_RISK),
        ({"on_absent": 1, "bad": 2}, AT_RISK),
        ({"on_absent": 1, "unanswered": 1}, DEGRADED),
        ({"on_absent": 1, "unanswered": 2}, UNKNOWN),
    ],
)
def test_a_copy_on_an_absent_bookie_is_missing_but_not_lost(
    copies: dict[str, int], expected: Grade
) -> None:
    assert grade(**copies) is expected


@pytest.mark.parametrize(
    ("write_quorum", "ack_quorum", "copies", "expected"),
    [
        (3, 2, {"excused": 1}, DEGRADED),
        (3, 2, {"excused": 2}, AT_RISK),
        (3, 2, {"excused": 3}, LOST),
        (3, 1, {"excused": 2}, DEGRADED),  # one copy is left, and one was promised
        (2, 1, {"excused": 1}, DEGRADED),
        (3, 2, {"excused": 1, "bad": 1}, AT_RISK),
        (3, 2, {"excused": 1, "on_absent": 1}, AT_RISK),
        (3, 2, {"excused": 1, "unanswered": 1}, UNKNOWN),
        (3, 2, {"excused": 2, "unanswered": 1}, AT_RISK),
    ],
)
def test_copies_beyond_the_ack_quorum_are_excused(
    write_quorum: int, ack_quorum: int, copies: dict[str, int], expected: Grade
) -> None:
    assert grade(write_quorum, ack_quorum, **copies) is expected


def test_a_copy_elsewhere_only_prevents_the_grade_lost() -> None:
    lost = EntryCopies(write_quorum=3, ack_quorum=2, bad=3, is_elsewhere=True)
    degraded = EntryCopies(write_quorum=3, ack_quorum=2, bad=1, is_elsewhere=True)

    assert (lost.grade, degraded.grade) == (AT_RISK, DEGRADED)


def test_the_grade_lost_needs_an_answer_for_every_copy() -> None:
    for bad, excused, on_absent, unanswered in itertools.product(range(4), repeat=4):
        if bad + excused + on_absent + unanswered > 3:
            continue
        found = grade(bad=bad, excused=excused, on_absent=on_absent, unanswered=unanswered)
        assert (found is LOST) == (bad + excused == 3)
        assert (found is WHOLE) == (bad + excused + on_absent + unanswered == 0)


def test_another_bad_copy_never_improves_the_grade() -> None:
    for bad, on_absent in itertools.product(range(4), repeat=2):
        if bad + on_absent < 3:
            before = grade(bad=bad, on_absent=on_absent)
            assert grade(bad=bad + 1, on_absent=on_absent).rank <= before.rank
