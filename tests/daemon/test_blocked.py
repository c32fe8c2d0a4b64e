"""What a command says of the ledgers that it waits for. ``test_decommission_refused`` and
``test_drains_blocked`` wait."""

from daemon.operations.waiting import waiting_text
from replication.ledger_record import WaitingNote
from replication.reasons import Blocked, Reason
from tests.said import Said

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


SCENES: dict[str, tuple[int, list[WaitingNote], int]] = {
    "none": (0, [], 12),
    "one": (1, notes(Reason.NO_ANSWER), 12),
    "all for windows": (2, notes(*[Reason.MAINTENANCE] * 2, next_try_ms=NOW_MS + 720_000), 2),
    "some for a window that is over": (
        90,
        notes(Reason.NO_TARGET, Reason.MAINTENANCE, next_try_ms=NOW_MS),
        90,
    ),
    "all for writers": (7, notes(*[Reason.OPEN_FRAGMENT] * 7), 7),
    "all are blocked": (12, notes(Reason.NO_TARGET), 12),
    "one is not blocked": (11, notes(Reason.NO_TARGET), 12),
}


def test_progress_says_how_many_ledgers_wait_and_for_what(said: Said) -> None:
    scenes = {
        name: waiting_text(count, some, left=left, now_ms=NOW_MS)
        for name, (count, some, left) in SCENES.items()
    }

    assert [name for name, text in scenes.items() if "this command ends" in text] == [
        "all are blocked"
    ]
    said("waiting", scenes)
