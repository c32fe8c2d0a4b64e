"""One run: creates a cluster, writes ledgers, kills a bookie, waits for all repairs, reads every
copy.

``Timeline`` records what is seen from outside while the daemons work: in ZooKeeper and in their
logs.

``write_ledgers`` writes the ledgers of ``bookmender local write``. If the writing stops early, the
ledgers written so far remain. A ledger that was begun is left as if its writer had died.
"""

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from auditor.scan import scan_ledgers
from daemon.admin_session import AdminSession, admin_session
from daemon.cli.progress import counted
from daemon.demo.nodes import Node, Nodes
from daemon.demo.proof import LedgerProof, Prover
from daemon.demo.workload import Workload, Written, open_workload, shapes, shapes_to_try
from daemon.local.cluster import LocalCluster
from daemon.settings import Settings
from daemon.status.gathering import gather_status
from daemon.status.state import Status
from ledgers.errors import (
    NotEnoughBookiesError,
    SessionLostError,
    UnavailableError,
)
from ledgers.model import BookieId
from replication.ledger_record import WaitingNote


@dataclass(slots=True)
class Timeline:
    """Times in seconds since the bookie was killed; None for events that have not happened."""

    bookie_gone_s: float | None = None
    """The bookie's znode was deleted, after ZooKeeper's session timeout."""
    first_mark_s: float | None = None
    whole_s: float | None = None
    leader: str | None = None
    marked_max: int = 0
    mended_ledgers: int = 0
    mended_entries: int = 0
    mended_bytes: int = 0
    zookeeper_requests: int = 0
    """Requests of the sessions that were closed normally. A multi counts as one."""
    errors: list[str] = field(default_factory=list)
    """Errors that a daemon logged. There should be none."""

    def hear(self, nodes: Sequence[Node]) -> None:
        """Read the new events in the daemons' logs."""
        for node in nodes:
            for event in node.events():
                self._note(node, event)

    def see(self, status: Status, *, bookie: str, now_s: float) -> None:
        """Update the timeline from the state of the cluster."""
        self.leader = status.services.leader
        self.marked_max = max(self.marked_max, status.queue.marked_count)
        if self.bookie_gone_s is None and bookie not in (
            *status.bookies.writable,
            *status.bookies.read_only,
        ):
            self.bookie_gone_s = now_s
        if self.first_mark_s is None and status.queue.marked_count:
            self.first_mark_s = now_s

    def _note(self, node: Node, event: dict[str, Any]) -> None:
        match event.get("event"):
            case "ledger.repaired":
                self.mended_ledgers += 1
                self.mended_entries += event.get("entry_count", 0)
                self.mended_bytes += event.get("entry_bytes", 0)
            case "session.closed":
                self.zookeeper_requests += event.get("request_count", 0)
            case "unreadable":
                self.errors.append(f"{node.name}: {event['line']}")
            case name if event.get("level") == "error":
                self.errors.append(f"{node.name}: {name} {event.get('error', '')}".rstrip())


def line(timeline: Timeline, status: Status, *, now_s: float) -> str:
    """Return one line of progress."""
    waiting = waiting_in_words(status.queue.waiting)
    return (
        f"{now_s:6.1f} s  leader {status.services.leader or 'none':<18} marked {status.queue.marked_count:>4}  "
        f"under repair {status.queue.locked_count:>3}  mended {timeline.mended_ledgers:>4} ledgers, "
        f"{timeline.mended_bytes / 1e6:.1f} MB" + (f"  waiting: {waiting}" if waiting else "")
    )


def waiting_in_words(notes: Sequence[WaitingNote]) -> str:
    counts: dict[str, int] = {}
    for note in notes:
        counts[note.reason.value] = counts.get(note.reason.value, 0) + 1
    return ", ".join(f"{count} {reason}" for reason, count in sorted(counts.items()))


def stuck_ledgers(status: Status) -> frozenset[int] | None:
    """Return the marked ledgers if all of them wait for help from outside; None while some can
    still be repaired."""
    stuck = [note.ledger_id for note in status.queue.waiting if note.reason.needs_help]
    is_all = status.queue.marked_count == len(stuck) == status.queue.waiting_count
    return frozenset(stuck) if is_all else None


Say = Callable[[str], None]


SEED = 1
SESSION_TIMEOUT_S = 4.0
GRACE_S = 5.0
POLL_S = 0.1
LINE_S = 1.0
SETTLE_TIMEOUT_S = 120.0
NODES_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The parameters of a run. ``kill_leader``: the leading daemon is killed as well, during the
    repairs."""

    data: Path
    bookkeeper: str | None = None
    ledger_count: int = 300
    bookie_count: int = 6
    node_count: int = 3
    kill_leader: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The result of a run. ``left``: the state of the cluster at the end."""

    plan: Plan
    timeline: Timeline
    proofs: list[LedgerProof]
    left: Status
    cpu_s: float
    """CPU time of the daemons that survived, counted from the kill."""
    rss_bytes_max: int


def run(plan: Plan, say: Say) -> Run:
    """Run the plan. Raises UnavailableError if the cluster does not start, or is not fully repaired
    in time."""
    say(
        f"starting ZooKeeper and {plan.bookie_count} bookies (session time-out {SESSION_TIMEOUT_S:g} s)"
    )
    with LocalCluster.start(  # in this thread, which receives Ctrl-C
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
            # The disk of a laptop is often nearly full; the local bookies tolerate that as well.
            "BOOKMENDER_REPLICATION_FREE_DISK_SHARE_MIN": "0",
            "BOOKMENDER_ZOOKEEPER_SESSION_TIMEOUT_S": f"{SESSION_TIMEOUT_S:g}",
        },
    )
    try:
        settings = Settings(metadata_service_uri=cluster.metadata_service_uri)
        async with admin_session(settings) as seen, open_workload(seen, rng) as workload:
            return await _run_with(plan, cluster, nodes, seen, workload, rng, say)
    finally:
        await asyncio.to_thread(nodes.stop)


def _in_tenths(say: Say) -> Callable[[int, int | None], None]:
    """Return a callback that reports the first download of BookKeeper's jars, which takes a
    minute."""
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
    seen: AdminSession,
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


async def _wait_for_nodes(plan: Plan, seen: AdminSession) -> None:
    try:
        async with asyncio.timeout(NODES_TIMEOUT_S):
            while not _are_ready(await gather_status(seen), plan):  # noqa: ASYNC110 - other processes
                await asyncio.sleep(POLL_S)
    except TimeoutError as error:
        raise UnavailableError(
            f"the daemons were not ready after {NODES_TIMEOUT_S:g} s; see the logs in {plan.data / 'logs'}"
        ) from error


def _are_ready(status: Status, plan: Plan) -> bool:
    services = status.services
    return len(services.nodes) == 2 * plan.node_count and services.leader is not None


async def _watch_until_settled(
    plan: Plan, nodes: Nodes, seen: AdminSession, killed: BookieId, say: Say
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


async def _is_whole(status: Status, seen: AdminSession, killed: BookieId) -> bool:
    """Return True if only ledgers that need the killed bookie itself still name it.

    An empty queue alone would prove nothing, because the marks may not exist yet.
    """
    stuck = stuck_ledgers(status)
    if stuck is None:
        return False
    scan = await scan_ledgers(seen.manager, lost=[killed])
    return {ledger.ledger_id for ledger in scan.underreplicated} == stuck


def _kill_leader(status: Status, nodes: Nodes, say: Say) -> bool:
    """Kill the leading daemon. Return False if there is no leader."""
    leader = nodes.by_pid(status.services.leader_node.pid) if status.services.leader_node else None
    if leader is None:
        return False
    say(f"killing the leader, {leader.name} (SIGKILL)")
    nodes.kill(leader)
    return True


def _spent(before: Mapping[str, float], after: Mapping[str, float]) -> float:
    return sum(cpu_s - before[name] for name, cpu_s in after.items())


LOOK_TIMEOUT_S = 3.0
"""After Ctrl-C, maximum time for looking up the state of the ledgers that were begun."""
LEFT_SHOWN_MAX = 10
CLOSE_HINT = "`bookmender ledger close ID --force --yes` closes one where it ends"
NEED = "ledgers that survive the loss of a bookie need three writable ones"


def write_ledgers(
    uri: str, ledger_count: int, *, written: list[Written], open_count: int = 0
) -> None:
    """Write ledgers that survive the loss of a bookie, and close all except the last
    ``open_count``.

    ``written``: receives each ledger when it is begun, so it is valid after any error. Raises
    NotEnoughBookiesError, also for fewer than three writable bookies; UnavailableError.
    """

    async def write() -> None:
        settings, rng = Settings(metadata_service_uri=uri), random.Random()
        async with admin_session(settings) as seen, open_workload(seen, rng) as workload:
            workload.written = written
            bookie_count = len((await seen.registration.read()).writable)
            wanted = shapes_to_try(ledger_count, open_count=open_count, bookie_count=bookie_count)
            if not wanted:
                raise NotEnoughBookiesError(NEED)
            try:
                await workload.write(wanted)
            except BaseException:  # also Ctrl-C
                await _look_again(workload)
                raise

    asyncio.run(write())


async def _look_again(workload: Workload) -> None:
    """Update the state of the ledgers that were begun. What cannot be read stays as it was last
    known."""
    with suppress(UnavailableError, SessionLostError, TimeoutError):
        async with asyncio.timeout(LOOK_TIMEOUT_S):
            await workload.look_again()


def what_was_written(written: Sequence[Written], *, ledger_count: int) -> list[str]:
    """Return lines of text about the ledgers that were written. ``ledger_count``: the number
    requested."""
    done = [each for each in written if each.is_done]
    entries = counted(sum(each.acknowledged for each in done), "entry")
    of = "" if len(done) == ledger_count else f"{len(done):,} of "
    lines = [f"wrote {of}{counted(ledger_count, 'ledger')}, {entries}"]
    if left := sorted(each.ledger_id for each in written if not each.is_closed):
        shown = ", ".join(map(str, left[:LEFT_SHOWN_MAX]))
        more = f" and {len(left) - LEFT_SHOWN_MAX:,} more" if len(left) > LEFT_SHOWN_MAX else ""
        lines.append(f"left open, as by a writer that died: ledger {shown}{more}")
    return lines


def so_far(written: Sequence[Written], *, ledger_count: int, ended: str) -> list[str]:
    """Return the same after an early end, and how to go on. ``ended``: one word."""
    if not written:
        return [f"{ended}; nothing was written"]
    first, *left = what_was_written(written, ledger_count=ledger_count)
    return [f"{ended}; {first}: they stay", *(f"{line}; {CLOSE_HINT}" for line in left)]
