"""One run: creates a cluster, writes ledgers, kills a bookie, waits for all repairs, reads every
copy.

``Timeline`` records what is seen from outside while the daemons work: in ZooKeeper and in their
logs.
"""

import asyncio
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from auditor.scan import scan_ledgers
from daemon.admin_session import AdminSession, admin_session
from daemon.cli.progress import Line
from daemon.demo.nodes import Node, Nodes
from daemon.demo.proof import LedgerProof, Prover
from daemon.demo.workload import Workload, open_workload, shapes
from daemon.local.cluster import LocalCluster
from daemon.settings import Settings
from daemon.status.gathering import gather_status
from daemon.status.state import Status
from ledgers.errors import UnavailableError
from ledgers.model import BookieId

SEED = 1
SESSION_TIMEOUT_S = 4.0
GRACE_S = 5.0
POLL_S = 0.1
LINE_S = 1.0
SETTLE_TIMEOUT_S = 120.0
NODES_TIMEOUT_S = 30.0

Say = Callable[[str], None]


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


@dataclass(slots=True)
class Timeline:
    """Times in seconds since the bookie was killed; None for events that have not happened."""

    bookie_gone_s: float | None = None
    """The bookie's znode was deleted, after ZooKeeper's session timeout."""
    first_mark_s: float | None = None
    whole_s: float | None = None
    marked_max: int = 0
    repaired_ledgers: int = 0
    repaired_entries: int = 0
    repaired_bytes: int = 0
    zookeeper_requests: int = 0
    """Requests of the sessions that were closed normally. A multi counts as one."""
    errors: list[str] = field(default_factory=list)
    """Errors that a daemon logged. There should be none."""

    def add_events(self, nodes: Sequence[Node]) -> None:
        """Add the new events in the daemons' logs."""
        for node in nodes:
            for event in node.events():
                self._add_event(node, event)

    def add_status(self, status: Status, *, bookie: BookieId, now_s: float) -> None:
        """Add the state of the cluster. ``bookie``: the bookie that was killed."""
        self.marked_max = max(self.marked_max, status.queue.marked_count)
        registered = (*status.bookies.writable, *status.bookies.read_only)
        if self.bookie_gone_s is None and bookie not in registered:
            self.bookie_gone_s = now_s
        if self.first_mark_s is None and status.queue.marked_count:
            self.first_mark_s = now_s

    def _add_event(self, node: Node, event: dict[str, Any]) -> None:
        match event.get("event"):
            case "ledger.repaired":
                self.repaired_ledgers += 1
                self.repaired_entries += event.get("entry_count", 0)
                self.repaired_bytes += event.get("entry_bytes", 0)
            case "session.closed":
                self.zookeeper_requests += event.get("request_count", 0)
            case "unreadable":
                self.errors.append(f"{node.name}: {event['line']}")
            case name if event.get("level") == "error":
                self.errors.append(f"{node.name}: {name} {event.get('error', '')}".rstrip())


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The result of a run. ``left``: the state of the cluster at the end."""

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
        f"starting ZooKeeper and {plan.bookie_count} bookies (session timeout "
        f"{SESSION_TIMEOUT_S:g} s)"
    )
    progress = Line(due_s=math.inf)  # shown on a terminal only
    with LocalCluster.start(  # in this thread, which receives Ctrl-C
        plan.data,
        bookies=plan.bookie_count,
        bookkeeper=plan.bookkeeper,
        session_timeout_s=SESSION_TIMEOUT_S,
        on_event=lambda event: progress.write(event, now_s=0),
    ) as cluster:
        progress.erase()
        return asyncio.run(_run_on(cluster, plan, say))


async def _run_on(cluster: LocalCluster, plan: Plan, say: Say) -> Run:
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
        async with admin_session(settings) as session, open_workload(session, rng) as workload:
            scenario = _Scenario(
                plan=plan, cluster=cluster, nodes=nodes, session=session, workload=workload, say=say
            )
            return await scenario.run(to_kill=rng.choice(cluster.bookies))
    finally:
        await asyncio.to_thread(nodes.stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scenario:
    plan: Plan
    cluster: LocalCluster
    nodes: Nodes
    session: AdminSession
    workload: Workload
    say: Say

    async def run(self, *, to_kill: BookieId) -> Run:
        plan, nodes, workload = self.plan, self.nodes, self.workload
        self.say(f"writing {plan.ledger_count} ledgers")
        await workload.write(shapes(plan.ledger_count))
        self.say(f"starting {plan.node_count} daemons (open-ledger grace {GRACE_S:g} s)")
        nodes.start(plan.node_count)
        await self._wait_for_nodes()

        cpu_s = nodes.cpu_s()
        self.say(f"killing bookie {to_kill} (SIGKILL)")
        self.cluster.kill(to_kill)
        timeline = await self._watch_until_settled(to_kill)
        spent_cpu_s = sum(now_s - cpu_s[name] for name, now_s in nodes.cpu_s().items())
        rss_bytes_max = nodes.rss_bytes_max()
        await asyncio.to_thread(nodes.stop)
        timeline.add_events(nodes.nodes)

        self.say("reading every copy of every entry")
        await workload.stop()
        prover = Prover(
            manager=self.session.manager,
            bookies=workload.bookies,
            clock=workload.clock,
            down=frozenset({to_kill}),
        )
        return Run(
            timeline=timeline,
            proofs=await prover.prove(workload.written),
            left=await gather_status(self.session),
            cpu_s=spent_cpu_s,
            rss_bytes_max=rss_bytes_max,
        )

    async def _wait_for_nodes(self) -> None:
        """Wait until both services of each node are registered and one auditor leads."""
        began_s = time.monotonic()
        while True:
            services = (await gather_status(self.session)).services
            if len(services.nodes) == 2 * self.plan.node_count and services.leader is not None:
                return
            if time.monotonic() - began_s > NODES_TIMEOUT_S:
                raise self._too_late("the daemons were not ready", NODES_TIMEOUT_S)
            await asyncio.sleep(POLL_S)

    async def _watch_until_settled(self, killed: BookieId) -> Timeline:
        timeline, began_s = Timeline(), time.monotonic()
        said_s, is_leader_to_die = 0.0, self.plan.kill_leader
        while timeline.whole_s is None:
            await asyncio.sleep(POLL_S)
            status = await gather_status(self.session)
            now_s = time.monotonic() - began_s
            timeline.add_events(self.nodes.nodes)
            timeline.add_status(status, bookie=killed, now_s=now_s)
            if is_leader_to_die and timeline.first_mark_s is not None:
                is_leader_to_die = not self._kill_leader(status)
            if await self._is_whole(status, killed):
                timeline.whole_s = now_s
            if timeline.whole_s is not None or now_s - said_s >= LINE_S:
                said_s = now_s
                self.say(_progress_text(timeline, status, now_s=now_s))
            if now_s > SETTLE_TIMEOUT_S:
                raise self._too_late("not all ledgers were repaired", SETTLE_TIMEOUT_S)
        return timeline

    async def _is_whole(self, status: Status, killed: BookieId) -> bool:
        """Return True if only ledgers that need the killed bookie itself still name it.

        An empty queue alone would prove nothing, because the marks may not exist yet.
        """
        queue = status.queue
        blocked = [note.ledger_id for note in queue.waiting if note.reason.needs_help]
        if not queue.marked_count == len(blocked) == queue.waiting_count:
            return False  # some ledgers can still be repaired
        scan = await scan_ledgers(self.session.manager, lost=[killed])
        return {ledger.ledger_id for ledger in scan.underreplicated} == set(blocked)

    def _kill_leader(self, status: Status) -> bool:
        """Kill the leading daemon. Return False if there is no leader."""
        leader = status.services.leader_node
        for node in self.nodes.nodes:
            if leader is not None and node.child.pid == leader.pid:
                self.say(f"killing the leader, {node.name} (SIGKILL)")
                node.child.kill()
                return True
        return False

    def _too_late(self, what: str, timeout_s: float) -> UnavailableError:
        return UnavailableError(
            f"{what} after {timeout_s:g} s; see the logs in {self.plan.data / 'logs'}"
        )


def _progress_text(timeline: Timeline, status: Status, *, now_s: float) -> str:
    queue = status.queue
    reasons = Counter(note.reason.value for note in queue.waiting)
    waiting = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
    return (
        f"{now_s:6.1f} s  leader {status.services.leader or 'none':<18} marked "
        f"{queue.marked_count:>4}  under repair {queue.locked_count:>3}  repaired "
        f"{timeline.repaired_ledgers:>4} ledgers, {timeline.repaired_bytes / 1e6:.1f} MB"
        + (f"  waiting: {waiting}" if waiting else "")
    )
