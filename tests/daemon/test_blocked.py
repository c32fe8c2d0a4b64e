"""When a ledger that is waited for counts as one that will not move by itself."""

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
        pytest.param(NOTE, NOTE, False, False, id="it was written before, and is tried soon"),
        pytest.param(replace(NOTE, tries=2), NOTE, True, True, id="it was tried since, in vain"),
        pytest.param(
            replace(NOTE, next_try_ms=NOW_MS + SOON_MS + 1),
            replace(NOTE, next_try_ms=NOW_MS + SOON_MS + 1),
            False,
            True,
            id="nobody waits so long",
        ),
        pytest.param(OVERDUE, OVERDUE, False, True, id="nobody tries it"),
        pytest.param(
            replace(NOTE, blocked=Blocked(reason=Reason.NO_COPY)),
            replace(NOTE, blocked=Blocked(reason=Reason.NO_COPY)),
            False,
            True,
            id="its next try changes nothing: a bookie must come",
        ),
        pytest.param(
            replace(NOTE, blocked=Blocked(reason=Reason.NO_COVERAGE)),
            replace(NOTE, blocked=Blocked(reason=Reason.NO_COVERAGE)),
            False,
            True,
            id="likewise",
        ),
        pytest.param(OVERDUE, OVERDUE, True, False, id="somebody is trying it"),
        pytest.param(
            replace(NOTE, next_try_ms=0),
            replace(NOTE, next_try_ms=0),
            False,
            True,
            id="at any time",
        ),
        pytest.param(
            replace(OVERDUE, next_try_ms=0, grace_until_ms=NOW_MS + 9_000),
            OVERDUE,
            True,
            False,
            id="it waits for the grace of the next try",
        ),
        pytest.param(
            replace(NOTE, tries=2, next_try_ms=0, grace_until_ms=NOW_MS + 9_000),
            NOTE,
            True,
            True,
            id="it waits for the next grace, and one failed since",
        ),
        pytest.param(
            replace(NOTE, blocked=Blocked(reason=Reason.NO_ANSWER), tries=2),
            NOTE,
            False,
            False,
            id="time will help",
        ),
    ],
)
def test_a_note_counts_once_its_next_try_was_made_or_will_not_be_soon(
    note: WaitingNote, first: WaitingNote, is_at_hand: bool, is_stuck: bool
) -> None:
    found = waits_for_help(note, first=first, is_at_hand=is_at_hand, now_ms=NOW_MS)

    assert found is is_stuck


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (1, "the ledger that is left has not moved for 2 min, and no worker of bookmender"),
        (1_200, "none of the 1,200 ledgers left has moved for 2 min, and no worker of bookmender"),
    ],
)
def test_that_nobody_says_why_nothing_moves_is_said(count: int, said: str) -> None:
    assert unexplained_text(count, still_s=120.0).startswith(said)


@pytest.mark.parametrize(
    ("waits", "left", "told"),
    [
        pytest.param(NO_WAITS, 12, "", id="none"),
        pytest.param(
            WaitingCounts(count=1, looked_at=1),
            12,
            "1 of them waits, bookmender queue list says why",
            id="one",
        ),
        pytest.param(
            WaitingCounts(count=2, looked_at=2, for_windows=2, next_try_ms=NOW_MS + 720_000),
            2,
            "2 of them wait for a maintenance window to end (next try in 12 min, or when its bookie is back), "
            "bookmender queue list says which",
            id="all of them for windows: nobody need help",
        ),
        pytest.param(
            WaitingCounts(count=90, looked_at=50, for_windows=1, next_try_ms=NOW_MS),
            90,
            "90 of them wait, some of them for a maintenance window to end, bookmender queue list says which",
            id="some for one, that is over",
        ),
        pytest.param(
            WaitingCounts(count=7, looked_at=7, for_writers=7),
            7,
            "7 of them wait for their writers to close them, however long that takes (a drain with --fence-open does "
            "not); bookmender queue list says which",
            id="all of them for writers, who need not come to an end",
        ),
        pytest.param(
            WaitingCounts(count=12, looked_at=12),
            12,
            "12 of them wait, bookmender queue list says why; where all need help, this ends a minute later",
            id="all of them: what that is waited for",
        ),
    ],
)
def test_of_ledgers_that_wait_it_is_told_how_the_waiting_for_them_ends(
    waits: WaitingCounts, left: int, told: str
) -> None:
    assert waiting_text(waits, left=left, now_ms=NOW_MS) == told
