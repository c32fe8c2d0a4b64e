"""What a command says of the ledgers that it waits for. ``test_decommission_refused`` and
``test_drains_blocked`` wait."""

import pytest

from daemon.operations.waiting import waiting_text
from replication.ledger_record import WaitingNote
from replication.reasons import Blocked, Reason

NOW_MS = 10**12


def notes(*reasons: Reason, next_try_ms: int = 0) -> list[WaitingNote]:
    return [
        WaitingNote(
            ledger_id=number,
            blocked=Blocked(reason=reason),
            node="host-a",
            since_ms=1,
            next_try_ms=next_try_ms,
        )
        for number, reason in enumerate(reasons)
    ]


@pytest.mark.parametrize(
    ("count", "some", "left", "told"),
    [
        pytest.param(0, [], 12, "", id="none"),
        pytest.param(1, notes(Reason.NO_ANSWER), 12, "1 of them waits; bookmender queue", id="one"),
        pytest.param(
            2,
            notes(Reason.MAINTENANCE, Reason.MAINTENANCE, next_try_ms=NOW_MS + 720_000),
            2,
            "2 of them wait for a maintenance window to end (next try in 12 min, or when its "
            "bookie is back); bookmender queue",
            id="all for windows: no help is needed",
        ),
        pytest.param(
            90,
            notes(Reason.NO_TARGET, Reason.MAINTENANCE, next_try_ms=NOW_MS),
            90,
            "90 of them wait, some of them for a maintenance window to end; bookmender queue",
            id="some for a window that is over",
        ),
        pytest.param(
            7,
            notes(*[Reason.OPEN_FRAGMENT] * 7),
            7,
            "7 of them wait until their writers close them (a drain with --fence-open",
            id="all for writers, which may never finish",
        ),
    ],
)
def test_progress_says_how_many_ledgers_wait_and_for_what(
    count: int, some: list[WaitingNote], left: int, told: str
) -> None:
    text = waiting_text(count, some, left=left, now_ms=NOW_MS)

    assert text.startswith(told)
    assert bool(text) is bool(count)


def test_progress_says_that_the_command_ends_if_all_stay_blocked() -> None:
    some = notes(Reason.NO_TARGET)

    assert "this command ends" in waiting_text(12, some, left=12, now_ms=NOW_MS)
    assert "this command ends" not in waiting_text(11, some, left=12, now_ms=NOW_MS)
