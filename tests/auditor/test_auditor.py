"""The Auditor in virtual time: what it marks, when, and what it survives."""

import asyncio
from collections.abc import Sequence

import pytest

from auditor.auditor import RETRY_S
from auditor.settings import AuditorSettings
from ledgers.errors import UnavailableError
from ledgers.metadata import BookieId
from ledgers.store import Delete
from replication import payloads
from tests.auditor.auditing import Leader, auditing, leading
from tests.replication.cluster import Cluster, in_virtual_time, until
from tests.replication.ledger_values import B1, B2, B3, B4, B5, BOOKIES
from tests.replication.nodes import ROOT, UR

DELAY = payloads.recovery_delay_path(UR)
SOON_S = 0.5
"""Within so long the auditor does what it does at once."""


async def with_ledgers(*ensembles: Sequence[BookieId]) -> Cluster:
    """Closed ledgers 0, 1, … on these bookies."""
    cluster = await Cluster.start()
    for ledger_id, ensemble in enumerate(ensembles):
        await cluster.write_ledger(ensemble, ledger_id=ledger_id)
    return cluster


def delayed(delay_s: int) -> AuditorSettings:
    return AuditorSettings(lost_bookie_recovery_delay_s=delay_s)


async def set_delay(cluster: Cluster, delay_s: int) -> None:
    data = payloads.recovery_delay_to_bytes(delay_s)
    await cluster.store.set(DELAY, data, version=-1)


async def marked_soon(cluster: Cluster) -> list[int]:
    await asyncio.sleep(SOON_S)
    return await cluster.marked()


async def replicas(cluster: Cluster, ledger_id: int) -> tuple[BookieId, ...]:
    data, _ = await cluster.store.get(payloads.mark_path(UR, ledger_id))
    return payloads.parse_mark(data).replicas


def count_scans(leader: Leader) -> list[float]:
    """The times at which all metadata was read, as it happens."""
    times_s: list[float] = []
    manager = leader.auditor._manager
    ledger_ids = manager.ledger_ids

    def counted():  # type: ignore[no-untyped-def]
        times_s.append(asyncio.get_running_loop().time())
        return ledger_ids()

    manager.ledger_ids = counted  # type: ignore[method-assign]
    return times_s


# --- A lost bookie --------------------------------------------------------------------------------


@in_virtual_time
async def test_the_ledgers_of_a_bookie_that_goes_are_marked() -> None:
    cluster = await with_ledgers((B1, B2), (B1, B3), (B2, B3))
    async with auditing(cluster):
        assert await marked_soon(cluster) == []

        await cluster.kill(B1)

        assert await marked_soon(cluster) == [0, 1]
        assert await replicas(cluster, 0) == (B1,)


@in_virtual_time
async def test_bookies_lost_before_the_election_are_found_by_their_cookies() -> None:
    cluster = await with_ledgers((B1, B2))
    await cluster.kill(B1)

    async with auditing(cluster):
        assert await marked_soon(cluster) == [0]


@in_virtual_time
async def test_a_bookie_that_a_ledger_names_though_it_has_no_cookie_is_lost_too() -> None:
    cluster = await with_ledgers((B1, B2), (B3, BookieId("decommissioned:3181")))

    async with auditing(cluster):
        assert await marked_soon(cluster) == [1]


@in_virtual_time
async def test_a_bookie_whose_cookie_was_deleted_while_it_ran_is_missed_when_it_goes() -> None:
    cluster = await with_ledgers((B1, B2))
    await cluster.store.delete(f"{ROOT}/cookies/{B1}")

    async with auditing(cluster):
        assert await marked_soon(cluster) == []
        await cluster.kill(B1)

        assert await marked_soon(cluster) == [0]


@in_virtual_time
async def test_a_bookie_that_turns_read_only_is_not_lost_until_it_goes() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster):
        await cluster.register(B1, is_read_only=True)
        await cluster.store.delete(f"{ROOT}/available/{B1}")
        assert await marked_soon(cluster) == []

        await cluster.kill(B1)
        assert await marked_soon(cluster) == [0]


@in_virtual_time
async def test_the_most_endangered_ledgers_are_marked_first() -> None:
    cluster = await with_ledgers((B1, B3), (B1, B2), (B3, B4))
    await cluster.kill(B1, B2)

    async with auditing(cluster):
        assert await marked_soon(cluster) == [0, 1]

    made = [await cluster.store.exists(payloads.mark_path(UR, i)) for i in (1, 0)]
    assert [stat.czxid for stat in made if stat] == sorted(s.czxid for s in made if s)
    assert await replicas(cluster, 1) == (B1, B2)


@in_virtual_time
async def test_a_loss_is_handled_once() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster) as leader:
        await asyncio.sleep(SOON_S)
        scans = count_scans(leader)
        await cluster.kill(B1)
        await asyncio.sleep(100)
        await cluster.register(BookieId("new:3181"))
        await asyncio.sleep(100)

        assert len(scans) == 1


@in_virtual_time
async def test_a_lost_bookie_that_comes_back_and_goes_again_is_audited_again() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster):
        await cluster.kill(B1)
        assert await marked_soon(cluster) == [0]
        await cluster.revive(B1)
        await asyncio.sleep(SOON_S)
        await cluster.store.delete(payloads.mark_path(UR, 0))  # a worker found it whole

        await cluster.kill(B1)
        assert await marked_soon(cluster) == [0]


@in_virtual_time
async def test_a_ledger_that_misses_more_now_has_its_mark_extended() -> None:
    cluster = await with_ledgers((B1, B2, B3))
    async with auditing(cluster):
        await cluster.kill(B1)
        await asyncio.sleep(SOON_S)
        await cluster.kill(B2)
        await asyncio.sleep(SOON_S)

        assert await replicas(cluster, 0) == (B1, B2)


# --- The recovery delay ---------------------------------------------------------------------------


@in_virtual_time
async def test_the_first_leader_publishes_its_delay_and_later_ones_obey_what_stands() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster, settings=delayed(60)):
        await asyncio.sleep(SOON_S)
        assert (await cluster.store.get(DELAY))[0] == b"60"

    async with auditing(cluster, settings=delayed(0)):
        await cluster.kill(B1)
        assert await marked_soon(cluster) == []
        assert (await cluster.store.get(DELAY))[0] == b"60"


@in_virtual_time
async def test_each_lost_bookie_waits_out_its_own_delay() -> None:
    cluster = await with_ledgers((B1, B3), (B2, B4))
    async with auditing(cluster, settings=delayed(60)):
        await cluster.kill(B1)
        await asyncio.sleep(30)
        await cluster.kill(B2)

        await asyncio.sleep(29)
        assert await cluster.marked() == []
        await asyncio.sleep(2)
        assert await cluster.marked() == [0]
        await asyncio.sleep(28)
        assert await cluster.marked() == [0]
        await asyncio.sleep(2)
        assert await cluster.marked() == [0, 1]


@in_virtual_time
async def test_a_bookie_that_is_back_within_the_delay_marks_nothing_and_begins_anew() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster, settings=delayed(60)):
        await cluster.kill(B1)
        await asyncio.sleep(50)
        await cluster.revive(B1)
        await asyncio.sleep(5)
        await cluster.kill(B1)

        await asyncio.sleep(58)
        assert await cluster.marked() == []
        await asyncio.sleep(4)
        assert await cluster.marked() == [0]


@pytest.mark.parametrize(
    ("delay_s", "marked_after_s"),
    [
        pytest.param(0, 20, id="none any more"),
        pytest.param(30, 30, id="a shorter one"),
        pytest.param(200, 200, id="a longer one"),
    ],
)
@in_virtual_time
async def test_a_delay_that_changes_counts_for_those_that_are_away_already(
    delay_s: int, marked_after_s: float
) -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster, settings=delayed(60)):
        await cluster.kill(B1)
        await asyncio.sleep(20)
        await set_delay(cluster, delay_s)

        if delay_s:
            await asyncio.sleep(marked_after_s - 20 - 1)
            assert await cluster.marked() == []
        await asyncio.sleep(2)
        assert await cluster.marked() == [0]


@in_virtual_time
async def test_as_with_java_a_delay_written_unchanged_asks_not_to_wait_any_longer() -> None:
    cluster = await with_ledgers((B1, B3), (B2, B4))
    async with auditing(cluster, settings=delayed(3600)) as leader:
        await asyncio.sleep(SOON_S)
        scans = count_scans(leader)
        await cluster.kill(B1)
        await set_delay(cluster, 3600)

        assert await marked_soon(cluster) == [0]
        await cluster.kill(B2)
        assert await marked_soon(cluster) == [0], "it goes later, and waits as usual"
        await asyncio.sleep(3605)
        assert await cluster.marked() == [0, 1]
        assert len(scans) == 2


@in_virtual_time
async def test_an_audit_that_is_asked_for_during_another_one_comes_after_it() -> None:
    cluster = await with_ledgers((B1, B2))
    async with leading(cluster) as leader:
        scans = count_scans(leader)
        mark_all, is_asked = leader.marker.mark_all, False

        async def slowly(ledgers: object) -> int:
            nonlocal is_asked
            if not is_asked:
                is_asked = True
                await asyncio.sleep(10)
                await set_delay(cluster, 0)
                await asyncio.sleep(10)
            return await mark_all([])

        leader.marker.mark_all = slowly  # type: ignore[method-assign]
        auditor = asyncio.create_task(leader.auditor.run())
        await asyncio.sleep(60)

        assert len(scans) == 2
        auditor.cancel()
        await asyncio.gather(auditor, return_exceptions=True)


@pytest.mark.parametrize("data", [b"", b"soon", b"-1"])
@in_virtual_time
async def test_a_delay_that_nobody_can_read_counts_as_the_settings(data: bytes) -> None:
    cluster = await with_ledgers((B1, B2))
    await cluster.store.create(DELAY, data)
    async with auditing(cluster, settings=delayed(60)):
        await cluster.kill(B1)
        await asyncio.sleep(58)
        assert await cluster.marked() == []
        await asyncio.sleep(4)
        assert await cluster.marked() == [0]


@in_virtual_time
async def test_a_delay_that_somebody_deletes_counts_as_the_settings() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster, settings=delayed(60)):
        await asyncio.sleep(SOON_S)
        await set_delay(cluster, 3600)
        await cluster.kill(B1)
        await asyncio.sleep(30)
        await cluster.store.delete(DELAY)
        await asyncio.sleep(32)

        assert await cluster.marked() == [0]


@in_virtual_time
async def test_a_reconnection_asks_for_nothing() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster, settings=delayed(3600)) as leader:
        await asyncio.sleep(SOON_S)
        scans = count_scans(leader)
        await cluster.kill(B1)
        cluster.tree.suspend(leader.store)
        await asyncio.sleep(5)
        cluster.tree.resume(leader.store)
        await asyncio.sleep(5)

        assert scans == []
        assert await cluster.marked() == []


# --- The switch -----------------------------------------------------------------------------------


@in_virtual_time
async def test_what_is_lost_while_it_is_disabled_is_marked_when_it_is_enabled() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster):
        await asyncio.sleep(SOON_S)
        await cluster.store.create(payloads.disable_path(UR))
        await cluster.kill(B1)
        await asyncio.sleep(100)
        assert await cluster.marked() == []

        await cluster.store.delete(payloads.disable_path(UR))
        assert await marked_soon(cluster) == [0]


@pytest.mark.parametrize("is_lost", [False, True])
@in_virtual_time
async def test_while_it_is_disabled_the_auditor_waits_and_asks_nothing(is_lost: bool) -> None:
    cluster = await with_ledgers((B1, B2))
    await cluster.store.create(payloads.disable_path(UR))
    if is_lost:
        await cluster.kill(B1)
    async with leading(cluster) as leader:
        auditor = asyncio.create_task(leader.auditor.run())
        await asyncio.sleep(SOON_S)
        before = leader.store.request_count
        await asyncio.sleep(3600)

        assert leader.store.request_count == before
        auditor.cancel()
        await asyncio.gather(auditor, return_exceptions=True)


# --- Regularly ------------------------------------------------------------------------------------


@in_virtual_time
async def test_all_metadata_is_compared_with_the_bookies_now_and_then() -> None:
    cluster = await with_ledgers((B1, B2))
    settings = AuditorSettings(bookie_check_interval_s=100)
    async with auditing(cluster, settings=settings) as leader:
        scans = count_scans(leader)
        await asyncio.sleep(350)

        assert len(scans) == 4
        await cluster.write_ledger((B1, BookieId("gone:3181")), ledger_id=9)
        await asyncio.sleep(101)
        assert await cluster.marked() == [9]


# --- What goes wrong ------------------------------------------------------------------------------


@in_virtual_time
async def test_rule_s8_an_audit_that_fails_is_tried_again_until_it_has_marked() -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster) as leader:
        await asyncio.sleep(SOON_S)
        mark_all, failures = leader.marker.mark_all, [UnavailableError("no answer")] * 2

        async def fail_at_first(ledgers):  # type: ignore[no-untyped-def]
            if failures:
                raise failures.pop()
            return await mark_all(ledgers)

        leader.marker.mark_all = fail_at_first  # type: ignore[method-assign]
        await cluster.kill(B1)

        async def is_marked() -> bool:
            return await cluster.marked() == [0]

        assert await until(cluster, is_marked) < 3 * RETRY_S


@in_virtual_time
async def test_rule_s8_an_unreadable_ledger_keeps_no_other_from_being_marked() -> None:
    cluster = await with_ledgers((B1, B2), (B1, B3), (B1, B4))
    await cluster.store.set(cluster.manager.path(1), b"rubbish", version=-1)
    await cluster.kill(B1)

    async with auditing(cluster):
        assert await marked_soon(cluster) == [0, 2]


@pytest.mark.parametrize("is_missing", [False, True], ids=["empty", "missing"])
@in_virtual_time
async def test_rule_s8_an_empty_or_missing_list_of_bookies_marks_nothing(is_missing: bool) -> None:
    cluster = await with_ledgers((B1, B2))
    async with auditing(cluster):
        await asyncio.sleep(SOON_S)
        paths = [*(f"available/{bookie}" for bookie in BOOKIES), "available/readonly", "available"]
        vanishing = paths if is_missing else paths[:-1]
        # All in one moment, as it looks from a new session on a server that is far behind.
        operations = [Delete(path=f"{ROOT}/{path}") for path in vanishing]
        cluster.tree.apply(cluster.store.session_id, operations)
        await asyncio.sleep(100)

        assert await cluster.marked() == []


@in_virtual_time
async def test_a_new_leader_goes_on_where_the_old_one_was_cut_off() -> None:
    cluster = await with_ledgers(*[(B1, B2)] * 20, *[(B3, B5)] * 5)
    async with auditing(cluster, "node-1") as first:
        await asyncio.sleep(SOON_S)

        async def cut_off(ledgers):  # type: ignore[no-untyped-def]
            for ledger in ledgers[:7]:
                await first.marker.mark(ledger.ledger_id, ledger.lost)
            await asyncio.sleep(3600)

        first.marker.mark_all = cut_off  # type: ignore[method-assign]
        await cluster.kill(B1)
        assert len(await marked_soon(cluster)) == 7

    async with auditing(cluster, "node-2"):
        assert await marked_soon(cluster) == list(range(20))
