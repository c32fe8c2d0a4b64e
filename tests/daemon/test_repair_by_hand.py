"""``bookmender repair``: which ledgers it finds, and what it says of blocked ones."""

import asyncio
import json

import pytest
from click.testing import CliRunner

from daemon.cli import repair as repair_command
from daemon.messages import message
from daemon.operations.repair import (
    Repaired,
    access_denied,
    find_ledgers,
    wait_done,
)
from daemon.operations.waiting import order_retries
from daemon.status.records import help_text
from replication import znodes
from replication.ledger_record import UnprovenEnd, WaitingNote
from replication.orders import OrderStore, TriesOrder, tries_znode
from replication.reasons import Blocked, Facts, Reason
from tests.auditor.scenes import with_ledgers
from tests.daemon.visits import Heard, visiting
from tests.replication.cluster import Cluster, in_virtual_time, shut_out
from tests.replication.ledger_values import B1, B2, B3
from tests.replication.nodes import PATHS
from tests.said import Said

NOW_MS = 1_000_000


@in_virtual_time
async def test_an_unknown_or_damaged_ledger_does_not_stop_the_others() -> None:
    cluster = await with_ledgers((B1, B2), (B1, B3), (B2, B3))
    await cluster.store.set(cluster.manager.path(1), b"", version=-1)

    found, failed = await find_ledgers(visiting(cluster), [99, 1, 0], None)
    of_b2, also_failed = await find_ledgers(visiting(cluster), [99], B2)

    assert [each.ledger_id for each in found] == [0]
    assert failed.keys() == {99, 1}
    assert "no such ledger" in failed[99]
    assert "cannot be read" in failed[1]
    assert {each.ledger_id for each in of_b2} == {0, 2}
    assert also_failed.keys() == {99}


@in_virtual_time
async def test_a_denied_ledger_does_not_stop_the_others() -> None:
    cluster = await with_ledgers((B1, B2), (B1, B3))
    admin_session = visiting(cluster)
    shut_out(admin_session.store, cluster.manager.path(1))

    found, failed = await find_ledgers(admin_session, [1, 0], None)

    assert [each.ledger_id for each in found] == [0]
    assert "shuts us out" in failed[1]


@pytest.mark.parametrize(
    "reason",
    [
        pytest.param(Reason.NO_TARGET, id="needs another bookie"),
        pytest.param(Reason.NO_COVERAGE, id="needs some of its own bookies"),
        pytest.param(Reason.HOLD, id="needs the end of a safety hold"),
        pytest.param(Reason.MAINTENANCE, id="its bookies are in maintenance, perhaps for hours"),
        pytest.param(Reason.OPEN_FRAGMENT, id="its writer must close it, perhaps in days"),
    ],
)
@in_virtual_time
async def test_a_ledger_that_needs_an_operator_is_not_waited_for(reason: Reason) -> None:
    cluster = await with_ledgers((B1, B2))
    await mark_and_note(cluster, reason)

    async with asyncio.timeout(600):
        [note] = await waited_for(cluster, Heard())

    assert note.reason is reason
    assert help_text(note).startswith(("ledger 0 waits for ", "ledger 0 is blocked: "))
    assert f": {reason.value}: " in help_text(note)


@in_virtual_time
async def test_an_unproven_end_is_tried_a_second_time() -> None:
    """The first try may have restored the copies that the recovery needed."""
    cluster = await with_ledgers((B1, B2))
    await mark_and_note(cluster, Reason.END_UNPROVEN)

    waiting = asyncio.create_task(waited_for(cluster, Heard()))
    await asyncio.sleep(60)
    assert not waiting.done()
    await note_again(cluster, Reason.END_UNPROVEN, tries=2)
    [note] = await asyncio.wait_for(waiting, 60)

    assert note.reason is Reason.END_UNPROVEN


@in_virtual_time
async def test_denied_marks_are_reported() -> None:
    cluster = await with_ledgers((B1, B2), (B1, B2), (B1, B2))
    marks = [PATHS.private.mark(ledger_id) for ledger_id in range(3)]
    await cluster.store.create(marks[0], znodes.mark_to_bytes(znodes.Mark()), with_parents=True)
    await cluster.store.create(marks[1], b"\xff", with_parents=True)
    await cluster.store.create(marks[2], znodes.mark_to_bytes(znodes.Mark()), with_parents=True)
    shut_out(cluster.store, marks[2])

    shut = await access_denied(cluster.store, PATHS, [0, 1, 2, 3])

    assert shut == {2: f"its mark cannot be read: the ACL shuts us out (path={marks[2]})"}


@in_virtual_time
async def test_a_ledger_that_only_needs_time_is_waited_for() -> None:
    cluster = await with_ledgers((B1, B2))
    await mark_and_note(cluster, Reason.OPEN_LEDGER_GRACE)
    heard = Heard()

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(600):
            await waited_for(cluster, heard)

    assert (heard.waiting[-1], heard.beside[-1]) == (1, "1 of them is waiting")


@in_virtual_time
async def test_progress_says_how_long_the_grace_lasts() -> None:
    cluster = await with_ledgers((B1, B2))
    await mark_and_note(cluster, Reason.OPEN_LEDGER_GRACE, grace_s=30)
    heard = Heard()

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(60):
            await waited_for(cluster, heard)

    left = "for the open-ledger grace another 30 s"
    assert heard.beside[0] == f"1 of them is waiting, {left}"
    assert heard.beside[-1] == "1 of them is waiting"


async def mark_and_note(cluster: Cluster, reason: Reason, *, grace_s: int = 0) -> None:
    """Put ledger 0 into the private queue, with the note of a worker."""
    note = WaitingNote(
        ledger_id=0,
        blocked=Blocked(reason=reason, facts=Facts(errors=("so it is",))),
        node="host-a",
        since_ms=0,
        grace_until_ms=cluster.clock.wall_ms() + grace_s * 1000 if grace_s else 0,
    )
    mark = PATHS.private.mark(0)
    await cluster.store.create(mark, znodes.mark_to_bytes(znodes.Mark()), with_parents=True)
    await cluster.store.create(PATHS.waiting_note(0), note.to_json(), with_parents=True)


async def note_again(cluster: Cluster, reason: Reason, *, tries: int) -> None:
    note = WaitingNote(
        ledger_id=0,
        blocked=Blocked(reason=reason, facts=Facts(errors=("so it is",))),
        node="host-a",
        since_ms=0,
        tries=tries,
    )
    await cluster.store.set(PATHS.waiting_note(0), note.to_json(), version=-1)


async def waited_for(cluster: Cluster, heard: Heard) -> tuple[WaitingNote, ...]:
    return await wait_done(cluster.store, PATHS, [0], show=heard.show, clock=cluster.clock)


def waits(next_try_ms: int) -> WaitingNote:
    blocked = Blocked(reason=Reason.MAINTENANCE, facts=Facts(in_maintenance=(B1, B2)))
    return WaitingNote(
        ledger_id=0, blocked=blocked, node="host-a", since_ms=0, next_try_ms=next_try_ms
    )


FAILED = Repaired.of(1, failed={99: "no such ledger"})
UNPROVEN = Repaired.of(
    2,
    unproven=(UnprovenEnd(ledger_id=44, facts=Facts(errors=("too many were wiped",)), tried_ms=0),),
)
SCENES = {
    "none is whole": Repaired.of(0, failed={99: "no such ledger"}),
    "one is whole": FAILED,
    "an unproven end": UNPROVEN,
    "maintenance, with the next try": Repaired.of(1, waiting=(waits(NOW_MS + 3_455_000),)),
    "maintenance, from an earlier release": Repaired.of(1, waiting=(waits(0),)),
}


def test_the_result_as_text(said: Said) -> None:
    said(
        "repair",
        {
            name: repair_command.result_text(done, mark_only=False, now_ms=NOW_MS)
            for name, done in SCENES.items()
        },
    )


@pytest.mark.parametrize(
    ("done", "facts"),
    [
        (
            FAILED,
            {
                "failed": [{"ledger_id": 99, "error": "no such ledger"}],
                "error": "could not work on 1 ledger: see failed",
            },
        ),
        (
            UNPROVEN,
            {
                "unproven_ends": [
                    {
                        "ledger_id": 44,
                        "reason": "end-unproven",
                        "facts": {"errors": ["too many were wiped"]},
                        "besides": [],
                        "detail": message(
                            44,
                            Blocked(
                                reason=Reason.END_UNPROVEN,
                                facts=Facts(errors=("too many were wiped",)),
                            ),
                        ).text,
                    }
                ]
            },
        ),
    ],
    ids=["failed", "unproven"],
)
def test_the_json_has_the_result_and_the_exit_code_is_1(
    monkeypatch: pytest.MonkeyPatch, done: Repaired, facts: dict[str, object]
) -> None:
    async def repaired(*_: object, **__: object) -> Repaired:
        return done

    monkeypatch.setenv("BOOKMENDER_METADATA_SERVICE_URI", "zk+hierarchical://127.0.0.1:1/ledgers")
    monkeypatch.setattr(repair_command, "repair_ledgers", repaired)

    text = CliRunner().invoke(repair_command.repair, ["44", "99"])
    record = CliRunner().invoke(repair_command.repair, ["44", "99", "-o", "json"])

    assert (text.exit_code, record.exit_code) == (1, 1)
    assert text.stdout.endswith("1 ledger checked and whole\n")
    printed = json.loads(record.stdout)
    assert {name: printed[name] for name in facts} == facts


@in_virtual_time
async def test_retries_of_several_ledgers_are_ordered_together() -> None:
    cluster = await with_ledgers((B1, B2))

    await order_retries([7, 8], cluster.store, PATHS, cluster.clock)
    await order_retries([9], cluster.store, PATHS, cluster.clock)

    stored = await OrderStore(cluster.store, PATHS).stored(tries_znode(PATHS))
    assert stored is not None
    assert isinstance(stored.value, TriesOrder)
    assert list(stored.value.ordered_ms) == [7, 8, 9]
