"""The bulk path where bookies do as they should: what arrives, in which numbers, and in whose turn."""

import asyncio
import itertools
import os

import pytest

from ledgers.bookie.budget import ASKED_BYTES_MAX
from ledgers.bookie.bulk.job import QUANTUM_COUNT
from ledgers.bookies import Answer, Transfer
from ledgers.entry import EntryDigest
from ledgers.metadata import BookieId, DigestType
from tests.ledgers.bulk_cases import DIGEST, LEDGER_ID, SHORT_TIMEOUT_S, Scene, play
from tests.vectors import cases


def test_entries_of_several_sources_arrive_at_the_target() -> None:
    async def act(scene: Scene) -> None:
        scene.fill(range(1_000))

        result = await scene.run(scene.halves(1_000))

        assert result.entry_count == 1_000
        assert scene.target.entries == scene.a.entries
        assert scene.is_at_rest()

    play(act)


def test_adds_carry_the_recovery_flag_alone_and_the_ledgers_key() -> None:
    async def act(scene: Scene) -> None:
        scene.fill(range(3))

        await scene.run(scene.halves(3))

        assert {(flags, key) for flags, key, _ in scene.target.adds} == {(2, DIGEST.master_key)}

    play(act)


def test_without_a_target_entries_are_only_verified() -> None:
    async def act(scene: Scene) -> None:
        scene.fill(range(100))

        result = await scene.run(scene.halves(100, target=None))

        assert result.entry_count == 100
        assert not scene.target.adds
        assert scene.is_at_rest()

    play(act)


def test_nothing_asked_is_nothing_done() -> None:
    async def act(scene: Scene) -> None:
        result = await scene.run(scene.halves(0))

        assert result.entry_count == 0
        assert scene.a.connection_count == scene.target.connection_count == 0

    play(act)


@pytest.mark.parametrize("digest_type", DigestType)
def test_every_digest_type_is_checked(digest_type: DigestType) -> None:
    async def act(scene: Scene) -> None:
        digest = EntryDigest(digest_type, b"secret")
        scene.a.put(digest, LEDGER_ID, range(20), b"payload")
        bad = bytearray(scene.a.entries[LEDGER_ID, 5])
        bad[-1] ^= 1
        scene.a.entries[LEDGER_ID, 5] = bytes(bad)
        scene.a.entries[LEDGER_ID, 6] = scene.a.entries[LEDGER_ID, 7]
        scene.a.entries[LEDGER_ID, 8] = scene.a.entries[LEDGER_ID, 8][:31]
        transfer = scene.halves(20, digest=digest, reads={scene.a.bookie_id: range(20)})

        result = await scene.run(transfer)

        expected = {6, 8} if digest_type is DigestType.DUMMY else {5, 6, 8}
        assert result.failures == {
            scene.a.bookie_id: dict.fromkeys(sorted(expected), Answer.MISMATCH)
        }
        assert not any((LEDGER_ID, entry_id) in scene.target.entries for entry_id in expected)

    play(act)


_GOLDEN = [case for case in cases("entries") if case["entry_id"] >= 0]


@pytest.mark.parametrize("case", _GOLDEN, ids=itertools.count())
def test_entries_written_by_java_are_good(case: dict[str, str | int]) -> None:
    async def act(scene: Scene) -> None:
        name = {"MAC": "HMAC"}.get(str(case["digest_type"]), str(case["digest_type"]))
        digest = EntryDigest(DigestType[name], bytes.fromhex(str(case["password"])))
        ledger_id, entry_id = int(case["ledger_id"]), int(case["entry_id"])
        scene.a.entries[ledger_id, entry_id] = bytes.fromhex(str(case["entry"]))
        transfer = Transfer(
            ledger_id=ledger_id,
            digest=digest,
            reads={scene.a.bookie_id: [entry_id]},
            target=scene.target.bookie_id,
        )

        assert (await scene.run(transfer)).entry_count == 1

    play(act)


@pytest.mark.parametrize(
    "payload_bytes",
    [
        pytest.param(0, id="empty"),
        pytest.param(1, id="one byte"),
        pytest.param(4_000, id="usual"),
        pytest.param(128 * 1024 - 64, id="where a frame just fits the shared buffer's part"),
        pytest.param(128 * 1024 - 63, id="where it just does not"),
        pytest.param(600_000, id="longer than the receive buffer"),
        pytest.param(5_242_816, id="the largest that a bookie takes"),
    ],
)
def test_entries_of_every_size_arrive(payload_bytes: int) -> None:
    async def act(scene: Scene) -> None:
        count = 4 if payload_bytes > 100_000 else 50
        scene.fill(range(count), payload=os.urandom(payload_bytes))

        result = await scene.run(scene.halves(count, entry_bytes_hint=payload_bytes))

        assert result.entry_count == count
        assert scene.is_at_rest()

    play(act)


def test_sizes_may_change_within_a_ledger() -> None:
    async def act(scene: Scene) -> None:
        sizes = [1, 200_000, 10, 1_000_000, 0, 70_000, 130_000, 5] * 3
        for entry_id, size in enumerate(sizes):
            scene.fill([entry_id], payload=os.urandom(size))

        result = await scene.run(scene.halves(len(sizes)))

        assert result.entry_count == len(sizes)
        assert scene.is_at_rest()

    play(act)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("split_bytes_max", [1, 7, 29, 100, 5_000])
def test_replies_may_be_split_anywhere_and_come_in_any_order(
    split_bytes_max: int, seed: int
) -> None:
    async def act(scene: Scene) -> None:
        scene.fill(range(30), payload=b"some payload")
        scene.fill([30, 31], payload=os.urandom(split_bytes_max * 30))
        for number, bookie in enumerate(scene.bookies):
            bookie.restart_random(seed * 10 + number)
            bookie.split_bytes_max = split_bytes_max
            bookie.is_reordering = True

        result = await scene.run(scene.halves(33))

        assert result.failures == {scene.a.bookie_id: {32: Answer.ABSENT}}
        assert scene.is_at_rest()

    play(act)


@pytest.mark.parametrize("cap", [1, 2, 64])
def test_reads_in_flight_stay_within_the_cap_over_all_transfers(cap: int) -> None:
    async def act(scene: Scene) -> None:
        scene.fill(range(300))
        scene.a.may_answer.clear()

        async with asyncio.TaskGroup() as group:
            for _ in range(5):
                group.create_task(scene.run(scene.halves(300)))
            await scene.until(lambda: scene.a.reads_in_flight == cap)
            scene.a.may_answer.set()

        assert scene.a.reads_in_flight_peak == cap
        assert scene.b.reads_in_flight_peak <= cap
        assert scene.is_at_rest()

    play(act, reads_in_flight_max=cap)


def test_the_cap_may_be_lowered_while_transfers_run() -> None:
    async def act(scene: Scene) -> None:
        scene.fill(range(2_000))
        async with asyncio.TaskGroup() as group:
            group.create_task(scene.run(scene.halves(2_000)))
            await scene.until(lambda: len(scene.a.reads_seen) > 100)

            scene.budgets.reads_in_flight_max = 3

            seen_count = len(scene.a.reads_seen)
            await scene.until(lambda: len(scene.a.reads_seen) > seen_count + 200)
            scene.a.reads_in_flight_peak = 0
        assert 1 <= scene.a.reads_in_flight_peak <= 3

    play(act)


def test_the_budget_is_shared_with_the_control_path() -> None:
    async def act(scene: Scene) -> None:
        scene.fill(range(500))
        budget = scene.budgets.reads(scene.a.bookie_id)
        assert budget.take(7, 100) == 7

        await scene.run(scene.halves(500))

        assert scene.a.reads_in_flight_peak == 3
        assert budget.count == 7
        budget.release(700, count=7)

    play(act, reads_in_flight_max=10)


def test_a_transfer_waits_until_the_control_path_gives_credit_back() -> None:
    async def act(scene: Scene) -> None:
        scene.fill(range(20))
        budget = scene.budgets.reads(scene.a.bookie_id)
        budget.take(4, 100)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(scene.run(scene.halves(20)))
            await scene.until_read(10)
            await scene.wait_checks(60.0)
            assert not running.done()
            assert not scene.a.reads_seen

            budget.release(400, count=4)

        assert running.result().entry_count == 20

    play(act, reads_in_flight_max=4, timeout_s=SHORT_TIMEOUT_S)


def test_the_control_path_gets_its_turn_while_a_transfer_runs() -> None:
    async def act(scene: Scene) -> None:
        scene.fill(range(2_000))
        budget = scene.budgets.reads(scene.a.bookie_id)
        async with asyncio.TaskGroup() as group:
            copying = group.create_task(scene.run(scene.halves(2_000)))
            await scene.until(lambda: budget.count == 4)
            for _ in range(20):
                await budget.acquire(1_000)
                budget.release(1_000)
            assert not copying.done()

    play(act, reads_in_flight_max=4)


def test_bytes_asked_stay_within_the_window_once_a_size_was_seen() -> None:
    async def act(scene: Scene) -> None:
        entry_bytes = 500_000
        scene.fill(range(60), payload=bytes(entry_bytes - 36))

        await scene.run(scene.halves(60, entry_bytes_hint=entry_bytes))

        assert scene.a.bytes_in_flight_peak <= ASKED_BYTES_MAX
        assert scene.a.reads_in_flight_peak > 1

    play(act)


def test_a_wrong_guess_of_the_size_costs_one_quantum_at_most() -> None:
    async def act(scene: Scene) -> None:
        scene.fill(range(100), payload=bytes(400_000))

        await scene.run(scene.halves(100, entry_bytes_hint=10))

        assert scene.a.reads_in_flight_peak <= max(QUANTUM_COUNT, ASKED_BYTES_MAX // 400_000)

    play(act)


def test_what_is_on_its_way_to_a_target_is_bounded() -> None:
    async def act(scene: Scene) -> None:
        scene.fill(range(500))
        scene.target.may_answer.clear()
        async with asyncio.TaskGroup() as group:
            group.create_task(scene.run(scene.halves(500)))
            await scene.until(lambda: scene.target.requests_waiting == 40)
            await scene.settle()

            assert len(scene.a.reads_seen) + len(scene.b.reads_seen) == 40
            scene.target.may_answer.set()
        assert scene.is_at_rest()

    play(act, writes_in_flight_max=40)


def test_a_full_target_does_not_hold_up_transfers_to_another() -> None:
    async def act(scene: Scene) -> None:
        scene.fill(range(500))
        scene.target.may_answer.clear()
        async with asyncio.TaskGroup() as group:
            stuck = group.create_task(scene.run(scene.halves(500)))
            await scene.until(lambda: scene.target.requests_waiting == 40)

            await scene.run(scene.halves(500, target=scene.others[0].bookie_id))

            assert not stuck.done()
            scene.target.may_answer.set()

    play(act, writes_in_flight_max=40, other_count=1)


def test_those_that_wait_for_a_full_target_go_on_in_their_order() -> None:
    async def act(scene: Scene) -> None:
        large, small = 100, range(200, 230)
        scene.fill(range(2_000), ledger_id=large)
        for ledger_id in small:
            scene.fill(range(10), ledger_id=ledger_id)
        async with asyncio.TaskGroup() as group:
            group.create_task(scene.run(scene.halves(2_000, ledger_id=large)))
            await scene.until(lambda: len(scene.target.adds) > 100)
            before = len(scene.target.adds)

            async with asyncio.TaskGroup() as waiting:
                for ledger_id in small:
                    waiting.create_task(scene.run(scene.halves(10, ledger_id=ledger_id)))

            # As often as each of the small ones the large one had its turn, for each of its sources.
            assert len(scene.target.adds) - before < 300 + 500

    play(act, writes_in_flight_max=20)


def test_entries_larger_than_guessed_wait_at_the_source_not_in_memory() -> None:
    async def act(scene: Scene) -> None:
        scene.fill(range(64), payload=bytes(1_000_000))
        scene.target.is_reading.clear()
        async with asyncio.TaskGroup() as group:
            group.create_task(scene.run(scene.halves(64, entry_bytes_hint=10)))
            await scene.until(lambda: scene.bulk.totals.entries_read >= 4)
            await scene.settle()

            # Of 32 MB that were asked for: what sockets hold, and what the transport may.
            assert scene.bulk.totals.read_bytes < 20_000_000
            scene.target.is_reading.set()

    play(act, writes_bytes_max=2_000_000)


def test_small_ledgers_are_not_starved_by_a_large_one() -> None:
    async def act(scene: Scene) -> None:
        scene.fill(range(5_000))
        small_ids = range(100, 110)
        for ledger_id in small_ids:
            scene.fill(range(10), ledger_id=ledger_id)
        async with asyncio.TaskGroup() as group:
            group.create_task(scene.run(scene.halves(5_000)))
            await scene.until(lambda: len(scene.a.reads_seen) > 100)
            before = len(scene.a.reads_seen)

            async with asyncio.TaskGroup() as small:
                for ledger_id in small_ids:
                    small.create_task(scene.run(scene.halves(10, ledger_id=ledger_id)))

            assert len(scene.a.reads_seen) - before < 1_000

    play(act)


@pytest.mark.parametrize("writes_in_flight_max", [8, 500])
def test_a_large_ledger_is_not_starved_by_small_ones(writes_in_flight_max: int) -> None:
    """Neither at its sources nor at its target, whose window newcomers could fill again and again."""

    async def act(scene: Scene) -> None:
        scene.fill(range(200))
        small_ids = range(100, 140)
        for ledger_id in small_ids:
            scene.fill(range(10), ledger_id=ledger_id)
        is_done = False

        async def repeat(ledger_id: int) -> None:
            while not is_done:
                await scene.run(scene.halves(2, ledger_id=ledger_id))

        async with asyncio.TaskGroup() as group:
            for ledger_id in small_ids:
                group.create_task(repeat(ledger_id))
            await scene.run(scene.halves(200))
            is_done = True

        assert len(scene.a.reads_seen) < 0

    play(act, writes_in_flight_max=writes_in_flight_max)


def test_large_entries_take_turns_one_by_one() -> None:
    """A quantum is limited in bytes too: a few large entries weigh as much as many small ones."""

    async def act(scene: Scene) -> None:
        large, small = range(100, 104), range(200, 204)
        for ledger_id in large:
            scene.fill(range(60), ledger_id=ledger_id, payload=bytes(200_000))
        for ledger_id in small:
            scene.fill(range(60), ledger_id=ledger_id)
        reads = {scene.a.bookie_id: range(60)}

        async with asyncio.TaskGroup() as group:
            for ledger_id in (*large, *small):
                transfer = scene.halves(0, ledger_id=ledger_id, reads=reads, target=None)
                group.create_task(scene.run(transfer))

        last_small = max(
            n for n, (ledger_id, _) in enumerate(scene.a.reads_seen) if ledger_id in small
        )
        large_before = sum(ledger_id in large for ledger_id, _ in scene.a.reads_seen[:last_small])
        assert large_before < 180  # of 240

    play(act)


def test_thousands_of_small_transfers_share_the_connections() -> None:
    async def act(scene: Scene) -> None:
        ledger_ids = range(1_000, 3_000)
        for ledger_id in ledger_ids:
            scene.fill(range(4), ledger_id=ledger_id)

        async with asyncio.TaskGroup() as group:
            for ledger_id in ledger_ids:
                group.create_task(scene.run(scene.halves(4, ledger_id=ledger_id)))

        assert scene.target.entries == scene.a.entries
        assert [bookie.connection_count for bookie in scene.bookies] == [1, 1, 1]
        assert scene.a.reads_in_flight_peak <= 64
        assert scene.is_at_rest()

    play(act)


def test_two_transfers_of_one_ledger_do_not_mix_up_their_replies() -> None:
    async def act(scene: Scene) -> None:
        scene.fill(range(200))
        other = scene.others[0]
        del scene.a.entries[LEDGER_ID, 10]

        first, second, check = await asyncio.gather(
            scene.run(scene.halves(200)),
            scene.run(scene.halves(150, target=other.bookie_id)),
            scene.run(scene.halves(100, target=None)),
        )

        assert first.entry_count == 199
        assert second.entry_count == 149
        assert check.entry_count == 99
        assert (len(scene.target.adds), len(other.adds)) == (199, 149)
        assert len(scene.a.reads_seen) == 100 + 75 + 50
        assert scene.is_at_rest()

    play(act, other_count=1)


def test_two_transfers_of_the_same_entries_to_one_target_both_end() -> None:
    async def act(scene: Scene) -> None:
        scene.fill(range(100))

        results = await asyncio.gather(*(scene.run(scene.halves(100)) for _ in range(3)))

        assert [result.entry_count for result in results] == [100, 100, 100]
        assert len(scene.target.adds) == 300
        assert scene.is_at_rest()

    play(act)


def test_a_bookie_may_be_source_and_target_at_once() -> None:
    async def act(scene: Scene) -> None:
        scene.a.put(DIGEST, 1, range(100))
        scene.b.put(DIGEST, 2, range(100))
        there = scene.halves(
            0, ledger_id=1, reads={scene.a.bookie_id: range(100)}, target=scene.b.bookie_id
        )
        back = scene.halves(
            0, ledger_id=2, reads={scene.b.bookie_id: range(100)}, target=scene.a.bookie_id
        )

        await asyncio.gather(scene.run(there), scene.run(back))

        assert scene.a.entries == scene.b.entries
        assert scene.a.connection_count == 2

    play(act)


def test_totals_count_what_was_read_and_written() -> None:
    async def act(scene: Scene) -> None:
        scene.fill(range(10))
        del scene.a.entries[LEDGER_ID, 4]

        copied = await scene.run(scene.halves(10))
        checked = await scene.run(scene.halves(10, target=None))

        totals = scene.bulk.totals
        assert (totals.entries_read, totals.entries_written) == (18, 9)
        assert totals.written_bytes == copied.entry_bytes
        assert totals.read_bytes == copied.entry_bytes + checked.entry_bytes

    play(act)


def test_a_bookie_is_found_by_its_registered_address() -> None:
    async def run(scene: Scene) -> None:
        addresses[BookieId("rack-1/bookie")] = ("127.0.0.1", int(scene.a.bookie_id.split(":")[1]))
        scene.fill(range(5))
        transfer = Transfer(
            ledger_id=LEDGER_ID, digest=DIGEST, reads={BookieId("rack-1/bookie"): range(5)}
        )

        result = await scene.bulk.transfer(transfer)

        assert result.entry_count == 5

    addresses: dict[BookieId, tuple[str, int]] = {}
    play(run, resolve=addresses.get)
