"""One run: a fresh cluster, written full, a bookie killed, everything mended, everything read."""

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from auditor.scan import scan_ledgers
from daemon.demo.nodes import Nodes
from daemon.demo.proof import LedgerProof, Prover
from daemon.demo.shapes import shapes
from daemon.demo.watching import Say, Timeline, line, stuck_ledgers
from daemon.demo.workload import Workload, open_workload
from daemon.local.cluster import LocalCluster
from daemon.settings import Settings
from daemon.status.gathering import gather_status
from daemon.status.state import Status
from daemon.visit import Visit, visit
from ledgers.errors import UnavailableError
from ledgers.metadata import BookieId

SEED = 1
SESSION_TIMEOUT_S = 4.0
GRACE_S = 5.0
POLL_S = 0.1
LINE_S = 1.0
SETTLE_TIMEOUT_S = 120.0
NODES_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be done. ``kill_leader``: the leading daemon dies too, in the middle of it."""

    data: Path
    bookkeeper: str | None = None
    ledger_count: int = 300
    bookie_count: int = 6
    node_count: int = 3
    kill_leader: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What came of it. ``left``: the state of the cluster at the end."""

    plan: Plan
    timeline: Timeline
    proofs: list[LedgerProof]
    left: Status
    cpu_s: float
    """Of the daemons that lived to the end, from the kill on."""
    rss_bytes_max: int


def run(plan: Plan, say: Say) -> Run:
    """Raises UnavailableError when the cluster does not come up, or is not whole in time."""
    say(
        f"starting ZooKeeper and {plan.bookie_count} bookies (session time-out {SESSION_TIMEOUT_S:g} s)"
    )
    with LocalCluster.start(  # here, where Ctrl-C reaches it
        plan.data,
        bookies=plan.bookie_count,
        bookkeeper=plan.bookkeeper,
        session_timeout_s=SESSION_TIMEOUT_S,
        on_fetch=_in_tenths(say),
    ) as cluster:
        return asyncio.run(_run_on(plan, cluster, say))


async def _run_on(plan: Plan, cluster: LocalCluster, say: Say) -> Run:
    rng = random.Random(SEED)
    nodes = Nodes(
        data=plan.data,
        settings={
            "BOOKMENDER_METADATA_SERVICE_URI": cluster.metadata_service_uri,
            "BOOKMENDER_REPLICATION_OPEN_LEDGER_GRACE_S": f"{GRACE_S:g}",
            # A laptop's disk is often nearly full; the local bookies put up with it as well.
            "BOOKMENDER_REPLICATION_FREE_ROOM_MIN": "0",
            "BOOKMENDER_ZOOKEEPER_SESSION_TIMEOUT_S": f"{SESSION_TIMEOUT_S:g}",
        },
    )
    try:
        settings = Settings(metadata_service_uri=cluster.metadata_service_uri)
        async with visit(settings) as seen, open_workload(seen, rng) as workload:
            return await _run_with(plan, cluster, nodes, seen, workload, rng, say)
    finally:
        await asyncio.to_thread(nodes.stop)


def _in_tenths(say: Say) -> Callable[[int, int | None], None]:
    """Tells of the first fetch of BookKeeper's jars, which takes a minute."""
    told: set[int] = set()

    def on_fetch(done: int, total: int | None) -> None:
        tenth = 10 * done // total if total else 0
        if tenth not in told:
            told.add(tenth)
            say(f"fetching BookKeeper's jars: {10 * tenth} %")

    return on_fetch


async def _run_with(
    plan: Plan,
    cluster: LocalCluster,
    nodes: Nodes,
    seen: Visit,
    workload: Workload,
    rng: random.Random,
    say: Say,
) -> Run:
    say(f"writing {plan.ledger_count} ledgers")
    await workload.write(shapes(plan.ledger_count))
    say(f"starting {plan.node_count} daemons (open-ledger grace {GRACE_S:g} s)")
    nodes.start(plan.node_count)
    await _wait_for_nodes(plan, seen)

    killed = rng.choice(cluster.bookies)
    cpu_s = nodes.cpu_s()
    say(f"killing bookie {killed} (SIGKILL)")
    cluster.kill(killed)
    timeline = await _watch_until_settled(plan, nodes, seen, killed, say)
    spent_cpu_s, rss_bytes_max = _spent(cpu_s, nodes.cpu_s()), nodes.rss_bytes_max()
    await asyncio.to_thread(nodes.stop)
    timeline.hear(nodes.nodes)

    say("reading every copy of every entry")
    await workload.stop()
    prover = Prover(
        manager=seen.manager,
        bookies=workload.bookies,
        clock=workload.clock,
        down=frozenset({killed}),
    )
    return Run(
        plan=plan,
        timeline=timeline,
        proofs=await prover.prove(workload.written),
        left=await gather_status(seen),
        cpu_s=spent_cpu_s,
        rss_bytes_max=rss_bytes_max,
    )


async def _wait_for_nodes(plan: Plan, seen: Visit) -> None:
    try:
        async with asyncio.timeout(NODES_TIMEOUT_S):
            while not _are_ready(await gather_status(seen), plan):  # noqa: ASYNC110 - other processes
                await asyncio.sleep(POLL_S)
    except TimeoutError as error:
        raise UnavailableError(
            f"the daemons were not ready after {NODES_TIMEOUT_S:g} s; see the logs in {plan.data / 'logs'}"
        ) from error


def _are_ready(status: Status, plan: Plan) -> bool:
    return len(status.nodes) == 2 * plan.node_count and status.leader is not None


async def _watch_until_settled(
    plan: Plan, nodes: Nodes, seen: Visit, killed: BookieId, say: Say
) -> Timeline:
    timeline, began_s = Timeline(), time.monotonic()
    said_s, is_whole, is_leader_to_die = 0.0, False, plan.kill_leader
    while not is_whole:
        await asyncio.sleep(POLL_S)
        status = await gather_status(seen)
        now_s = time.monotonic() - began_s
        timeline.hear(nodes.nodes)
        timeline.see(status, bookie=killed, now_s=now_s)
        if is_leader_to_die and timeline.first_mark_s is not None:
            is_leader_to_die = not _kill_leader(status, nodes, say)
        is_whole = await _is_whole(status, seen, killed)
        if is_whole:
            timeline.whole_s = now_s
        if is_whole or now_s - said_s >= LINE_S:
            said_s = now_s
            say(line(timeline, status, now_s=now_s))
        if now_s > SETTLE_TIMEOUT_S:
            raise UnavailableError(
                f"not whole after {SETTLE_TIMEOUT_S:g} s; see the logs in {plan.data / 'logs'}"
            )
    return timeline


async def _is_whole(status: Status, seen: Visit, killed: BookieId) -> bool:
    """Whether nothing names the killed bookie any more but ledgers that only it can help.

    An empty queue alone would prove nothing: the marks may not have been made yet.
    """
    stuck = stuck_ledgers(status)
    if stuck is None:
        return False
    scan = await scan_ledgers(seen.manager, lost=[killed])
    return {ledger.ledger_id for ledger in scan.endangered} == stuck


def _kill_leader(status: Status, nodes: Nodes, say: Say) -> bool:
    """Whether there was a leader to kill."""
    leader = nodes.by_pid(status.leader_node.pid) if status.leader_node else None
    if leader is None:
        return False
    say(f"killing the leader, {leader.name} (SIGKILL)")
    nodes.kill(leader)
    return True


def _spent(before: Mapping[str, float], after: Mapping[str, float]) -> float:
    return sum(cpu_s - before[name] for name, cpu_s in after.items())
