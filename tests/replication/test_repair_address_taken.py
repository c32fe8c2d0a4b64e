"""A bookie was decommissioned, and another bookie answers at its address under another id (rule
S5)."""

import asyncio
from collections import Counter

import pytest

from daemon.operations.close import CloseRefusedError
from ledgers.errors import LocalLimitError, NameNotResolvedError, NoAnswerError, UnavailableError
from ledgers.model import BookieId, LedgerState
from ledgers.registration import SESSION_EXPIRED_S
from replication.cluster import RESOLVE_AGAIN_S
from replication.open_ledgers import WriterSighting
from replication.reasons import Reason
from replication.repair import Outcome, OutcomeKind
from replication.work_queue import LedgerLease
from tests.daemon.closing import close
from tests.memory.bookies import NO_FAULT, Fault, Op
from tests.replication.cluster import Cluster
from tests.replication.ledger_values import B1, B2, B3, B4, BOOKIES
from tests.replication.nodes import LEDGER, ROOT, Node
from tests.replication.repairs import blocked_by, open_ledger, watch_fencing


async def with_newcomer() -> Cluster:
    """Return an open ledger. B1 and B2 acknowledged entry 10 (the ack quorum is 2), and its copy
    for B3 was lost. B1 is lost for ever; B4 answers at its address."""
    cluster = await open_ledger()
    cluster.put(LEDGER, 10, B1, B2)
    for bookie in (B1, B2, B3):
        cluster.bookie(bookie).flush()
    await cluster.kill(B1)
    cluster.bookies.take_address(B4, of=B1)
    return cluster


def is_slow(cluster: Cluster, bookie: BookieId) -> None:
    """Let the bookie answer no read in time."""
    late = Fault(delay_s=6, error=NoAnswerError)
    cluster.bookies.faults = lambda b, op, i: late if b == bookie and op is not Op.ADD else NO_FAULT


async def first_grace(node: Node) -> tuple[LedgerLease, WriterSighting]:
    lease = await node.lease()
    sighting = (await node.repairer.repair(lease)).sighting
    assert sighting is not None
    return lease, sighting


async def recover(node: Node) -> Outcome:
    return await node.repairer.repair(*await first_grace(node))


# --- Recovery -------------------------------------------------------------------------------------


async def test_a_newcomers_no_cuts_off_no_acknowledged_entry() -> None:
    """The newcomer has the address of an absent bookie."""
    cluster = await with_newcomer()
    async with cluster.node() as node:
        lease, sighting = await first_grace(node)
        is_slow(cluster, B2)

        outcome = await node.repairer.repair(lease, sighting)

        assert outcome.reason is Reason.RECOVERY_FAILED
        assert not (await cluster.metadata()).is_closed
        cluster.bookies.faults = lambda b, op, i: NO_FAULT

        await node.repairer.repair(lease, sighting)

    metadata = await cluster.metadata()
    assert metadata.last_entry_id == 10
    await cluster.assert_whole()


async def test_nothing_is_written_to_a_bookie_that_is_not_registered() -> None:
    cluster = await with_newcomer()
    sent: Counter[tuple[BookieId, Op]] = Counter()

    def count(bookie: BookieId, op: Op, ledger_id: int) -> Fault:
        sent[bookie, op] += 1
        return NO_FAULT

    cluster.bookies.faults = count
    async with cluster.node() as node:
        await recover(node)

    assert (await cluster.metadata()).is_closed
    assert sent[B3, Op.ADD] > 0
    assert sent[B1, Op.ADD] == 0


async def test_an_entry_read_from_an_unregistered_bookie_is_kept() -> None:
    cluster = await open_ledger()
    cluster.put(LEDGER, 10, B1)  # acknowledged by B1 and B2; B2 has lost its copy since
    for bookie in (B1, B2, B3):
        cluster.bookie(bookie).flush()
    await cluster.unregister(B1)  # its session is gone, and it goes on answering
    async with cluster.node() as node:
        await recover(node)

    assert (await cluster.metadata()).last_entry_id == 10


@pytest.mark.parametrize("is_wiped", [False, True], ids=["another session", "another bookie"])
async def test_answers_from_before_a_new_registration_do_not_count(is_wiped: bool) -> None:
    cluster = await open_ledger()
    await cluster.kill(B1)
    async with cluster.node() as node:
        lease, sighting = await first_grace(node)
        read_fencing, has_changed = cluster.bookies.read_fencing, False

        async def change(*args: object, **options: object) -> bytes:
            nonlocal has_changed
            if not has_changed:
                has_changed = True
                await cluster.unregister(B3)
                if is_wiped:
                    await cluster.store.delete(f"{ROOT}/cookies/{B3}")
                    await cluster.store.create(f"{ROOT}/cookies/{B3}")
                await cluster.register(B3)
            return await read_fencing(*args, **options)  # type: ignore[arg-type]

        cluster.bookies.read_fencing = change  # type: ignore[method-assign]

        outcome = await node.repairer.repair(lease, sighting)

        assert outcome.reason is Reason.RECOVERY_FAILED
        assert "recovery must be retried" in blocked_by(outcome).facts.errors[0]
        assert (await cluster.metadata()).state is LedgerState.IN_RECOVERY


async def test_a_recovery_stops_if_an_address_is_taken_over() -> None:
    """The address belongs to a bookie whose answer counted."""
    cluster = await open_ledger()
    await cluster.kill(B1)
    newcomer = BookieId("newcomer")
    async with cluster.node() as node:
        lease, sighting = await first_grace(node)
        confirm, has_come = node.views.doubts_about, False

        async def come_first(*args: object, **options: object) -> object:
            nonlocal has_come
            if not has_come:
                has_come = True
                await cluster.register_at(newcomer, B3)
            return await confirm(*args, **options)  # type: ignore[arg-type]

        node.views.doubts_about = come_first  # type: ignore[method-assign, assignment]

        outcome = await node.repairer.repair(lease, sighting)

    assert f"{B3}: newcomer registered at its address" in blocked_by(outcome).facts.errors[0]
    assert not (await cluster.metadata()).is_closed


KNOWN_HOSTS = {f"b{n}": f"10.0.0.{n}" for n in range(1, 7)} | {"node-1.example": "10.0.0.1"}


async def resolve(host: str) -> list[str]:
    if host not in KNOWN_HOSTS:
        raise NameNotResolvedError("host name does not resolve", host=host)
    return [KNOWN_HOSTS[host]]


@pytest.mark.parametrize(
    "host",
    [
        pytest.param("b1", id="the same spelling"),
        pytest.param("node-1.example", id="another name of the host"),
        pytest.param("unknown.example", id="a name that does not resolve"),
    ],
)
async def test_a_newcomer_is_recognised_however_it_spells_the_address(host: str) -> None:
    """B1 and its disk are gone, but its session is not over. The newcomer says "no" in its name."""
    cluster = await open_ledger()
    cluster.put(LEDGER, 10, B1, B2)  # acknowledged
    for bookie in (B1, B2, B3):
        cluster.bookie(bookie).flush()
    await cluster.kill(B2)
    await cluster.unregister(B4)
    await cluster.register_at(B4, B1, host=host)
    cluster.bookies.take_address(B4, of=B1)
    async with cluster.node(resolve=resolve) as node:
        lease, sighting = await first_grace(node)

        outcome = await node.repairer.repair(lease, sighting)

        assert outcome.kind is OutcomeKind.WAITING
        assert not (await cluster.metadata()).is_closed
        await cluster.unregister(B1)
        await cluster.revive(B2)
        await asyncio.sleep(SESSION_EXPIRED_S)

        again = await node.repairer.repair(lease)
        await node.repairer.repair(lease, again.sighting)

    assert (await cluster.metadata()).last_entry_id == 10


async def test_a_host_that_does_not_resolve_delays_recoveries_for_one_session_timeout() -> None:
    """Then the other bookies would not be registered any more if it had their address."""
    cluster = await open_ledger()
    await cluster.kill(B1)
    await cluster.register_at(BookieId("newcomer"), B3, host="unknown.example")
    async with cluster.node(resolve=resolve) as node:
        lease, sighting = await first_grace(node)

        early = await node.repairer.repair(lease, sighting)
        await asyncio.sleep(SESSION_EXPIRED_S)
        await node.repairer.repair(lease, sighting)

    assert "newcomer, whose host is unknown, may have" in blocked_by(early).facts.errors[0]
    assert (await cluster.metadata()).is_closed


async def test_a_bookie_at_anothers_address_by_an_outdated_name_answers_again(
    cluster: Cluster,
) -> None:
    """B4 received the address that B1 had before, and DNS still says that it is B1's."""
    hosts = {"b1": "10.0.0.9", "b4": "10.0.0.9"}

    async def resolve(host: str) -> list[str]:
        return [hosts.get(host, host)]

    async with cluster.node(resolve=resolve) as node:
        await asyncio.sleep(5)
        assert node.views.current.bookies.superseded == {B1}
        hosts["b1"] = "10.0.0.10"
        await asyncio.sleep(RESOLVE_AGAIN_S)

        assert B1 in node.views.current.answering


async def test_bookies_are_seen_although_this_process_can_look_up_no_name(cluster: Cluster) -> None:

    async def resolve(host: str) -> list[str]:
        raise LocalLimitError("this process can open no further file", host=host)

    async with cluster.node(resolve=resolve) as node:
        await cluster.kill(B1)
        await asyncio.sleep(1)

        assert node.views.current.available == frozenset(BOOKIES) - {B1}


async def test_a_close_by_hand_does_not_trust_a_newcomer() -> None:
    cluster = await with_newcomer()
    is_slow(cluster, B2)
    fenced = watch_fencing(cluster)
    is_slow(cluster, B2)

    with pytest.raises(CloseRefusedError, match="not registered"):
        await close(cluster, is_forced=True)

    assert fenced == []
    assert (await cluster.metadata()).state is LedgerState.OPEN


async def test_a_bookie_whose_address_was_taken_over_is_not_used(cluster: Cluster) -> None:
    """It is neither asked nor a target."""
    await cluster.register_at(BookieId("newcomer"), B4)

    async with cluster.node() as node:
        view = node.views.current

        assert B4 not in view.receiving
        assert B4 not in view.answering
        assert BookieId("newcomer") in view.answering
        with pytest.raises(UnavailableError, match="newcomer"):
            node.views.resolve(B4)
