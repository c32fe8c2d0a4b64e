"""A command waits for ledgers until they count as blocked."""

from dataclasses import replace

import pytest

from daemon.cli.blocked import (
    NO_WAITS,
    SOON_S,
    WaitingCounts,
    unexplained_text,
    waiting_text,
    waits_for_help,
)
from replication.ledger_record import WaitingNote
from replication.reasons import Blocked, Facts, Reason

NOW_MS = 10**12
SOON_MS = int(SOON_S * 1000)
NOTE = WaitingNote(
    ledger_id=5,
    blocked=Blocked(reason=Reason.JOURNAL, facts=Facts(errors=("no room",))),
    node="host-a",
    since_ms=1,
    next_try_ms=NOW_MS + 1_000,
)
OVERDUE = replace(NOTE, next_try_ms=NOW_MS - 1)


@pytest.mark.parametrize(
    ("note", "first", "is_at_hand", "is_stuck"),
    [
        pytest.param(NOTE, NOTE, False, False, id="an old note, and the next try is soon"),
        pytest.param(replace(NOTE, tries=2), NOTE, True, True, id="a try since has failed"),
        pytest.param(
            replace(NOTE, next_try_ms=NOW_MS + SOON_MS + 1),
            replace(NOTE, next_try_ms=NOW_MS + SOON_MS + 1),
            False,
            True,
            id="the next try is too late",
        ),
        pytest.param(OVERDUE, OVERDUE, False, True, id="the next try is overdue"),
        pytest.param(
            replace(NOTE, blocked=Blocked(reason=Reason.NO_COPY)),
            replace(NOTE, blocked=Blocked(reason=Reason.NO_COPY)),
            False,
            True,
            id="a next try changes nothing without a new bookie",
        ),
        pytest.param(
            replace(NOTE, blocked=Blocked(reason=Reason.NO_COVERAGE)),
            replace(NOTE, blocked=Blocked(reason=Reason.NO_COVERAGE)),
            False,
            True,
            id="a next try changes nothing without coverage",
        ),
        pytest.param(OVERDUE, OVERDUE, True, False, id="a try is under way"),
        pytest.param(
            replace(NOTE, next_try_ms=0),
            replace(NOTE, next_try_ms=0),
            False,
            True,
            id="the next try is due",
        ),
        pytest.param(
            replace(OVERDUE, next_try_ms=0, grace_until_ms=NOW_MS + 9_000),
            OVERDUE,
            True,
            False,
            id="the next try waits for a grace",
        ),
        pytest.param(
            replace(NOTE, tries=2, next_try_ms=0, grace_until_ms=NOW_MS + 9_000),
            NOTE,
            True,
            True,
            id="the next try waits for a grace, after a failure",
        ),
        pytest.param(
            replace(NOTE, blocked=Blocked(reason=Reason.NO_ANSWER), tries=2),
            NOTE,
            False,
            False,
            id="time resolves it",
        ),
    ],
)
def test_a_note_blocks_after_its_next_try_or_if_that_is_late(
    note: WaitingNote, first: WaitingNote, is_at_hand: bool, is_stuck: bool
) -> None:
    """A note blocks a ledger if the next try was made in vain, or is not due soon."""
    found = waits_for_help(note, first=first, is_at_hand=is_at_hand, now_ms=NOW_MS)

    assert found is is_stuck


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (1, "The last ledger has not moved for 2 min. No bookmender worker"),
        (1_200, "None of the 1,200 remaining ledgers has moved for 2 min. No bookmender worker"),
    ],
)
def test_ledgers_that_stand_still_without_a_reason_are_reported(count: int, said: str) -> None:
    assert unexplained_text(count, still_s=120.0).startswith(said)


@pytest.mark.parametrize(
    ("waits", "left", "told"),
    [
        pytest.param(NO_WAITS, 12, "", id="none"),
        pytest.param(
            WaitingCounts(count=1, looked_at=1),
            12,
            "1 of them waits; bookmender queue list shows the reasons",
            id="one",
        ),
        pytest.param(
            WaitingCounts(count=2, looked_at=2, for_windows=2, next_try_ms=NOW_MS + 720_000),
            2,
            "2 of them wait for a maintenance window to end (next try in 12 min, or when its "
            "bookie is back); bookmender queue list shows the reasons",
            id="all for windows: no help is needed",
        ),
        pytest.param(
            WaitingCounts(count=90, looked_at=50, for_windows=1, next_try_ms=NOW_MS),
            90,
            "90 of them wait, some of them for a maintenance window to end; bookmender queue list "
            "shows the reasons",
            id="some for a window that is over",
        ),
        pytest.param(
            WaitingCounts(count=7, looked_at=7, for_writers=7),
            7,
            "7 of them wait until their writers close them (a drain with --fence-open does not "
            "wait); bookmender queue list shows the reasons",
            id="all for writers, which may never finish",
        ),
        pytest.param(
            WaitingCounts(count=12, looked_at=12),
            12,
            "12 of them wait; bookmender queue list shows the reasons; if all stay blocked, this "
            "command ends in a minute",
            id="all of them",
        ),
    ],
)
def test_progress_says_how_many_ledgers_wait_and_for_what(
    waits: WaitingCounts, left: int, told: str
) -> None:
    assert waiting_text(waits, left=left, now_ms=NOW_MS) == told
