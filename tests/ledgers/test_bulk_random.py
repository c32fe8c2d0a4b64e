"""The bulk path under all faults at once, drawn from a seed. ``Scene.check`` says what must
hold."""

import asyncio
import random

import pytest
from msgspec.structs import replace

from ledgers.bookies import TransferResult
from tests.fake_bookie import FakeBookie, forged_reply
from tests.ledgers.bulk_cases import DIGEST, SHORT_TIMEOUT_S, Scene, play

LEDGERS = range(100, 130)
ENTRIES = range(60)
TRANSFERS = 120


def _spoil(scene: Scene, chance: random.Random) -> None:
    """Give every bookie missing, damaged or refused entries."""
    for bookie in (scene.a, scene.b):
        for key in chance.sample(sorted(bookie.entries), 100):
            match chance.randrange(3):
                case 0:
                    del bookie.entries[key]
                case 1:
                    bookie.entries[key] = bookie.entries[key][:-1] + b"?"
                case 2:
                    bookie.read_codes[key] = chance.choice([2, 101, 106])
    for bookie in (scene.target, scene.others[0]):
        for _ in range(5):
            key = chance.choice(LEDGERS), chance.choice(ENTRIES)
            bookie.add_codes[key] = chance.choice([101, 104, 105])


def _strike(bookie: FakeBookie, chance: random.Random) -> None:
    match chance.randrange(6):
        case 0:
            bookie.reset()
        case 1:
            bookie.forged.append(chance.randbytes(chance.randrange(1, 200)))
        case 2:
            bookie.forged.append(forged_reply(length=chance.choice([-1, 3, 1 << 30])))
        case 3:
            bookie.extra = [forged_reply(ledger_id=chance.choice(LEDGERS), entry_id=3, code=2)]
        case 4:
            bookie.extra = []
        case 5:
            bookie.split_bytes_max = chance.choice([0, 1, 10, 1_000])


@pytest.mark.compat(
    "G22",
    verdict="better",
    why="every request has a deadline, and each requested entry gets exactly one result",
)
@pytest.mark.compat("G23", verdict="better", why="one event loop owns all answers")
@pytest.mark.parametrize("is_stormy", [False, True], ids=["calm", "stormy"])
@pytest.mark.parametrize("reads_batches", [False, True], ids=["singles", "batches"])
@pytest.mark.parametrize("seed", range(8))
def test_each_entry_has_one_true_result_under_random_faults(
    seed: int, is_stormy: bool, reads_batches: bool
) -> None:
    """Calm: entries are damaged, callers leave. Stormy: connections break too, and bookies lie."""
    chance = random.Random(seed)
    cap = chance.choice([1, 5, 64])

    async def act(scene: Scene) -> None:
        for ledger_id in LEDGERS:
            scene.fill(
                ENTRIES, ledger_id=ledger_id, payload=chance.randbytes(chance.randrange(300))
            )
        _spoil(scene, chance)
        for number, bookie in enumerate(scene.bookies):
            bookie.restart_random(seed * 100 + number)
            bookie.is_reordering = chance.random() < 0.5
            bookie.answers_twice = is_stormy and chance.random() < 0.3
        results: list[TransferResult] = []

        async def work() -> None:
            for _ in range(TRANSFERS // 8):
                target = chance.choice([None, scene.target.bookie_id, scene.others[0].bookie_id])
                count = chance.choice([1, 10, len(ENTRIES)])
                form = chance.choice([scene.halves, scene.runs]) if reads_batches else scene.halves
                transfer = form(count, ledger_id=chance.choice(LEDGERS), target=target)
                if target is not None:
                    unread = set(range(count)) - set(transfer.reads[scene.b.bookie_id])
                    transfer = replace(transfer, checks={scene.b.bookie_id: sorted(unread)})
                running = asyncio.create_task(scene.run(transfer))
                if chance.random() < 0.2:
                    await scene.settle()
                    running.cancel()
                    await asyncio.wait([running])
                if not running.cancelled():
                    results.append(await running)

        async with asyncio.TaskGroup() as group:
            workers = [group.create_task(work()) for _ in range(8)]
            while not all(worker.done() for worker in workers):
                await scene.settle()
                if is_stormy and chance.random() < 0.2:
                    _strike(chance.choice(scene.bookies), chance)
                if is_stormy:
                    scene.skip(chance.choice([0.0, 0.0, 0.1, 1.0]))

        assert sum(result.entry_count for result in results) > 100
        if not is_stormy:  # a bookie that lies, or breaks off, cannot be counted right
            assert max(scene.a.reads_in_flight_peak, scene.b.reads_in_flight_peak) <= cap
        await scene.wait_checks(40.0)
        await scene.until(scene.is_at_rest)
        assert all(
            DIGEST.is_good(entry, ledger_id=ledger_id, entry_id=entry_id)
            for bookie in (scene.target, scene.others[0])
            for (ledger_id, entry_id), entry in bookie.entries.items()
        )

    play(
        act,
        reads_in_flight_max=cap,
        other_count=1,
        timeout_s=SHORT_TIMEOUT_S,
        reads_batches=reads_batches,
    )
