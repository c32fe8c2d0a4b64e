"""One run: creates a cluster, writes ledgers, kills a bookie, waits for all repairs, reads every
copy."""

import asyncio
import json
import math
import os
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from auditor.scan import scan_ledgers
from daemon.admin_session import AdminSession, admin_session
from daemon.cli.progress import Line
from daemon.demo.proof import LedgerProof, Prover
from daemon.local.cluster import LocalCluster
from daemon.local.processes import Child, stop_all
from daemon.local.writing import open_workload
from daemon.settings import Settings
from daemon.status.gathering import gather_status
from daemon.status.state import Status
from ledgers.errors import UnavailableError
from ledgers.model import BookieId

SEED = 1
LEFT_OPEN = 5
SESSION_TIMEOUT_S = 4.0
GRACE_S = 5.0
POLL_S = 0.1
LINE_S = 1.0
SETTLE_TIMEOUT_S = 120.0
NODES_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 6.0

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
class Run:
    """The result of a run. Times are in seconds since the bookie was killed; None for events that
    have not happened."""

    bookie_gone_s: float | None = None
    """The bookie's znode was deleted, after ZooKeeper's session timeout."""
    first_mark_s: float | None = None
    whole_s: float | None = None
    marked_max: int = 0
    repaired_ledgers: int = 0
    repaired_entries: int = 0
    repaired_bytes: int = 0
    errors: list[str] = field(default_factory=list)
    """Errors that a daemon logged. There should be none."""
    proofs: list[LedgerProof] = field(default_factory=list)

    def add_log(self, node: Child) -> None:
        """Add the events that a daemon has logged."""
        for line in node.log.read_text(errors="replace").splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                self.errors.append(f"{node.name}: {line}")
                continue
            if event.get("event") == "ledger.repaired":
                self.repaired_ledgers += 1
                self.repaired_entries += event.get("entry_count", 0)
                self.repaired_bytes += event.get("entry_bytes", 0)
            elif event.get("level") == "error":
                self.errors.append(f"{node.name}: {event.get('event')} {event.get('error', '')}")


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
    settings = Settings(metadata_service_uri=cluster.metadata_service_uri)
    nodes: list[Child] = []
    async with admin_session(settings) as session, open_workload(session, rng) as workload:
        try:
            say(f"writing {plan.ledger_count} ledgers")
            await workload.write(plan.ledger_count, open_count=LEFT_OPEN)
            say(f"starting {plan.node_count} daemons (open-ledger grace {GRACE_S:g} s)")
            nodes += start_nodes(
                plan.data,
                plan.node_count,
                {
                    "BOOKMENDER_METADATA_SERVICE_URI": cluster.metadata_service_uri,
                    "BOOKMENDER_REPLICATION_OPEN_LEDGER_GRACE_S": f"{GRACE_S:g}",
                    # The disk of a laptop is often nearly full; the bookies tolerate that as well.
                    "BOOKMENDER_REPLICATION_FREE_DISK_SHARE_MIN": "0",
                    "BOOKMENDER_ZOOKEEPER_SESSION_TIMEOUT_S": f"{SESSION_TIMEOUT_S:g}",
                },
            )
            await _wait_for_nodes(session, plan)
            killed = rng.choice(cluster.bookies)
            say(f"killing bookie {killed} (SIGKILL)")
            cluster.kill(killed)
            result = await _watch_until_whole(session, plan, nodes, killed, say)
        finally:
            await asyncio.to_thread(stop_all, nodes, timeout_s=STOP_TIMEOUT_S)
        for node in nodes:
            result.add_log(node)
        say("reading every copy of every entry")
        prover = Prover(
            manager=session.manager,
            bookies=workload.bookies,
            clock=workload.clock,
            down=frozenset({killed}),
        )
        result.proofs = await prover.prove(workload.written)
    return result


def start_nodes(
    data: Path, count: int, settings: Mapping[str, str], *, config: Path | None = None
) -> list[Child]:
    """Start daemons, each a separate process with its log below ``data``. ``settings``: environment
    variables that override those of this process. ``config``: the file of their settings."""
    given = {k: v for k, v in os.environ.items() if not k.startswith("BOOKMENDER_")}
    given |= {
        "BOOKMENDER_LOG_FORMAT": "json",
        "BOOKMENDER_LOG_LEVEL": "debug",
        "BOOKMENDER_HTTP_PORT": "0",  # several nodes share this machine's ports
        **settings,
    }
    options = [] if config is None else ["--config", str(config)]
    return [
        Child(
            name,
            [sys.executable, "-m", "daemon", "daemon", *options],
            log=data / "logs" / f"{name}.log",
            environment={**given, "BOOKMENDER_NODE_STATE_DIR": str(data / name)},
        )
        for name in (f"node-{number}" for number in range(1, count + 1))
    ]


async def _wait_for_nodes(session: AdminSession, plan: Plan) -> None:
    """Wait until both services of each node are registered and one auditor leads."""
    deadline_s = time.monotonic() + NODES_TIMEOUT_S
    while True:
        services = (await gather_status(session)).services
        if len(services.nodes) == 2 * plan.node_count and services.leader is not None:
            return
        if time.monotonic() > deadline_s:
            raise _too_late("the daemons were not ready", plan, NODES_TIMEOUT_S)
        await asyncio.sleep(POLL_S)


async def _watch_until_whole(
    session: AdminSession, plan: Plan, nodes: Sequence[Child], killed: BookieId, say: Say
) -> Run:
    """Watch from outside, in ZooKeeper, until all ledgers are repaired."""
    seen, began_s, said_s = Run(), time.monotonic(), 0.0
    is_leader_to_die = plan.kill_leader
    while seen.whole_s is None:
        await asyncio.sleep(POLL_S)
        status = await gather_status(session)
        queue, now_s = status.queue, time.monotonic() - began_s
        seen.marked_max = max(seen.marked_max, queue.marked_count)
        if killed not in (*status.bookies.writable, *status.bookies.read_only):
            seen.bookie_gone_s = seen.bookie_gone_s or now_s
        if queue.marked_count:
            seen.first_mark_s = seen.first_mark_s or now_s
            if is_leader_to_die:
                is_leader_to_die = not _kill_leader(status, nodes, say)
        # An empty queue alone would prove nothing, because the marks may not exist yet.
        elif not (await scan_ledgers(session.manager, lost=[killed])).underreplicated:
            seen.whole_s = now_s
        if seen.whole_s is not None or now_s - said_s >= LINE_S:
            said_s = now_s
            say(
                f"{now_s:6.1f} s  leader {status.services.leader or 'none':<18} marked "
                f"{queue.marked_count:>4}  under repair {queue.locked_count:>3}"
            )
        if now_s > SETTLE_TIMEOUT_S:
            raise _too_late("not all ledgers were repaired", plan, SETTLE_TIMEOUT_S)
    return seen


def _kill_leader(status: Status, nodes: Sequence[Child], say: Say) -> bool:
    """Kill the leading daemon. Return False if there is no leader."""
    leader = status.services.leader_node
    for node in nodes:
        if leader is not None and node.pid == leader.pid:
            say(f"killing the leader, {node.name} (SIGKILL)")
            node.kill()
            return True
    return False


def _too_late(what: str, plan: Plan, timeout_s: float) -> UnavailableError:
    return UnavailableError(f"{what} after {timeout_s:g} s; see the logs in {plan.data / 'logs'}")
