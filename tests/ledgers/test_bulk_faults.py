"""The bulk path with bookies that refuse or lie: the result of each entry."""

import asyncio
import random

import pytest

from ledgers.bookies import Answer
from ledgers.bulk.connection import UNREQUESTED_MAX
from ledgers.errors import (
    BookmenderError,
    BusyError,
    FencedError,
    ReadOnlyError,
    UnauthorizedError,
    UnavailableError,
    UnreadableError,
)
from ledgers.wire.framing import FRAME_BYTES_MAX
from tests.fake_bookie import ADD, READ, forged_reply
from tests.ledgers.bulk_cases import LEDGER_ID, Scene, in_scene


@pytest.mark.parametrize(
    ("code", "answer"),
    [
        pytest.param(1, Answer.ABSENT, id="no such ledger"),
        pytest.param(2, Answer.ABSENT, id="no such entry"),
        pytest.param(100, Answer.UNKNOWN, id="bad request"),
        pytest.param(101, Answer.UNREADABLE, id="disk error"),
        pytest.param(102, Answer.UNKNOWN, id="unauthorised"),
        pytest.param(106, Answer.UNKNOWN, id="too many requests"),
        pytest.param(107, Answer.UNKNOWN, id="in limbo, which is no no"),
        pytest.param(-5, Answer.UNKNOWN, id="an unknown code"),
    ],
)
@pytest.mark.parametrize("is_copy", [True, False], ids=["copy", "check"])
@in_scene()
async def test_the_code_of_a_read_reply_decides(
    scene: Scene, code: int, answer: Answer, is_copy: bool
) -> None:
    scene.fill(range(40))
    scene.a.read_codes = {(LEDGER_ID, entry_id): code for entry_id in (0, 10, 12, 38)}
    changes = {} if is_copy else {"target": None}

    result = await scene.run(scene.halves(40, **changes))

    assert result.failures == {scene.a.bookie_id: dict.fromkeys((0, 10, 12, 38), answer)}
    assert result.entry_count == 36
    assert scene.is_at_rest()


@pytest.mark.parametrize(
    ("code", "error"),
    [
        pytest.param(100, UnavailableError, id="bad request"),
        pytest.param(101, UnreadableError, id="disk error"),
        pytest.param(102, UnauthorizedError, id="another master key"),
        pytest.param(104, FencedError, id="deleted there before"),
        pytest.param(105, ReadOnlyError, id="read-only"),
        pytest.param(106, BusyError, id="too many requests"),
        pytest.param(999, UnavailableError, id="an unknown code"),
    ],
)
@in_scene()
async def test_a_target_that_refuses_ends_the_transfer_with_its_reason(
    scene: Scene, code: int, error: type[BookmenderError]
) -> None:
    scene.fill(range(2_000))
    scene.target.add_codes[LEDGER_ID, 300] = code

    result = await scene.run(scene.halves(2_000))

    assert type(result.target_error) is error
    assert 300 in result.unwritten
    assert result.entry_count + len(result.unwritten) == 2_000
    assert len(scene.a.reads_seen) < 900  # it stopped asking
    await scene.until(scene.is_at_rest)


@in_scene()
async def test_a_refused_ledger_does_not_disturb_others_at_that_target(scene: Scene) -> None:
    for ledger_id in range(20):
        scene.fill(range(50), ledger_id=ledger_id)
    scene.target.add_codes = {(13, entry_id): 104 for entry_id in range(50)}

    results = await asyncio.gather(
        *(scene.run(scene.halves(50, ledger_id=ledger_id)) for ledger_id in range(20))
    )

    refused = [n for n, result in enumerate(results) if result.target_error]
    assert refused == [13]
    assert all(r.entry_count == 50 for n, r in enumerate(results) if n != 13)
    assert scene.target.connection_count == 1
    await scene.until(scene.is_at_rest)


LIES = [
    pytest.param(forged_reply(length=-1), id="negative length"),
    pytest.param(forged_reply(length=0), id="no length"),
    pytest.param(forged_reply(length=23), id="shorter than any reply"),
    pytest.param(forged_reply(length=0x7FFF_FFFF), id="longest possible frame"),
    pytest.param(forged_reply(length=FRAME_BYTES_MAX), id="just above the limit"),
    pytest.param(forged_reply(operation=7), id="reply to another operation"),
    pytest.param(forged_reply(version=1), id="another version"),
    pytest.param(forged_reply(code=2, length=40, entry=bytes(16)), id="an entry with an error"),
    pytest.param(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 2, id="not even the protocol"),
    pytest.param(random.Random(1).randbytes(5_000), id="noise"),
]


@pytest.mark.parametrize("lie", LIES)
@in_scene()
async def test_a_source_that_lies_loses_its_connection(scene: Scene, lie: bytes) -> None:
    """No other transfer suffers."""
    scene.fill(range(200))
    scene.fill(range(200), ledger_id=8)
    scene.a.forged.append(lie)

    lied_to, other = await asyncio.gather(
        scene.run(scene.halves(200)),
        scene.run(scene.halves(0, ledger_id=8, reads={scene.b.bookie_id: range(200)}, target=None)),
    )

    failed = lied_to.failures[scene.a.bookie_id]
    assert set(failed.values()) == {Answer.UNKNOWN}
    assert scene.b.bookie_id not in lied_to.failures
    assert other.entry_count == 200
    assert scene.is_at_rest()
    assert scene.a.connection_count == 1


@in_scene()
async def test_good_entries_before_a_lie_in_the_same_packet_count(scene: Scene) -> None:
    scene.fill(range(30))
    scene.a.may_answer.clear()
    async with asyncio.TaskGroup() as group:
        transfer = scene.halves(0, reads={scene.a.bookie_id: range(16)})
        running = group.create_task(scene.run(transfer))
        await scene.until(lambda: scene.a.reads_in_flight == 16)
        scene.a.honest_answers = 10
        scene.a.forged.append(forged_reply(length=-1))
        scene.a.may_answer.set()

    result = running.result()
    assert result.entry_count == 10
    assert len(result.failures[scene.a.bookie_id]) == 6


@pytest.mark.parametrize(
    "lie",
    [
        pytest.param(forged_reply(operation=ADD, length=25, entry=b"x"), id="wrong length"),
        pytest.param(forged_reply(operation=READ), id="reply to a read"),
        pytest.param(forged_reply(operation=ADD, length=-1), id="negative length"),
        pytest.param(random.Random(2).randbytes(5_000), id="noise"),
    ],
)
@in_scene()
async def test_a_target_that_lies_fails_its_unacknowledged_entries(
    scene: Scene, lie: bytes
) -> None:
    scene.fill(range(200))
    scene.target.forged.append(lie)

    result = await scene.run(scene.halves(200))

    assert isinstance(result.target_error, UnavailableError)
    assert not result.failures
    assert result.unwritten


@pytest.mark.parametrize("operation", [READ, ADD])
@in_scene()
async def test_unrequested_replies_are_ignored(scene: Scene, operation: int) -> None:
    scene.fill(range(50))
    liar = scene.a if operation == READ else scene.target
    liar.extra = [
        forged_reply(operation=operation, ledger_id=LEDGER_ID, entry_id=4_711),
        forged_reply(operation=operation, ledger_id=99, entry_id=1, code=2),
    ]

    result = await scene.run(scene.halves(50))

    assert result.entry_count == 50
    assert scene.is_at_rest()


@in_scene()
async def test_every_reply_may_come_twice(scene: Scene) -> None:
    scene.fill(range(300))
    del scene.a.entries[LEDGER_ID, 8]
    for bookie in scene.bookies:
        bookie.answers_twice = True

    result = await scene.run(scene.halves(300))

    assert result.entry_count == 299
    assert result.failures == {scene.a.bookie_id: {8: Answer.ABSENT}}
    assert scene.is_at_rest()


@pytest.mark.parametrize("operation", [READ, ADD])
@in_scene()
async def test_a_flood_of_unrequested_replies_ends_the_connection(
    scene: Scene, operation: int
) -> None:
    scene.fill(range(2))
    liar = scene.a if operation == READ else scene.target
    forged = forged_reply(operation=operation, ledger_id=99, entry_id=1)
    liar.forged.append(forged * (UNREQUESTED_MAX + 1))

    result = await scene.run(scene.halves(2))

    if operation == READ:
        assert result.failures == {liar.bookie_id: {0: Answer.UNKNOWN}}
    else:
        assert isinstance(result.target_error, UnavailableError)


@pytest.mark.parametrize("operation", [READ, ADD])
@in_scene()
async def test_many_unrequested_replies_among_good_ones_are_no_flood(
    scene: Scene, operation: int
) -> None:
    scene.fill(range(200))
    liar = scene.a if operation == READ else scene.target
    forged = forged_reply(operation=operation, ledger_id=99, entry_id=1)
    liar.extra = [forged * (UNREQUESTED_MAX // 20)]

    result = await scene.run(scene.halves(200))

    assert result.entry_count == 200
    assert liar.connection_count == 1


@in_scene()
async def test_a_reply_with_another_entry_inside_is_a_mismatch(scene: Scene) -> None:
    scene.fill(range(10))
    scene.fill(range(10), ledger_id=8)
    scene.a.entries[LEDGER_ID, 2] = scene.a.entries[LEDGER_ID, 4]
    scene.a.entries[LEDGER_ID, 6] = scene.a.entries[8, 6]

    result = await scene.run(scene.halves(10))

    mismatched = {2: Answer.MISMATCH, 6: Answer.MISMATCH}
    assert result.failures == {scene.a.bookie_id: mismatched}
    assert {(LEDGER_ID, 2), (LEDGER_ID, 6)}.isdisjoint(scene.target.entries)


@in_scene()
async def test_codes_are_reported_with_the_ids_a_reader_needs(scene: Scene) -> None:
    scene.fill(range(4))
    scene.target.add_codes[LEDGER_ID, 3] = 104

    result = await scene.run(scene.halves(4))

    assert result.target_error is not None
    assert result.target_error.context == {
        "bookie": scene.target.bookie_id,
        "ledger_id": LEDGER_ID,
        "entry_id": 3,
        "code": 104,
    }
