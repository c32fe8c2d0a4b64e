"""``bookmender demo``: kills one of several real bookies and proves that no entry was lost.

A ``Run`` creates a cluster, writes ledgers, starts daemons, kills a bookie and waits for all
repairs. ``prove`` then reads every copy of every entry from every bookie that the metadata
names. It uses nothing that the daemons reported: it reads metadata and entries itself, verifies
digests, and compares the payloads of each ledger with what was written.
"""

import asyncio
import json
import math
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click

from auditor.scan import scan_ledgers
from daemon.admin_session import AdminSession, admin_session
from daemon.cli.option_types import Folder
from daemon.cli.progress import Line
from daemon.local.cluster import LocalCluster
from daemon.local.processes import Child, stop_all
from daemon.local.writing import Workload, Written, open_workload
from daemon.settings import Settings
from daemon.status.gathering import gather_status
from ledgers.bookies import Transfer
from ledgers.errors import BookmenderError, UnavailableError
from ledgers.model import BookieId, LedgerMetadata, fragments
from ledgers.reading import LedgerReader, OpenedLedger, find_end, replicas_in
from replication.copy_reader import transfer_slices

SEED = 1
LEFT_OPEN = 5
SESSION_TIMEOUT_S = 4.0
GRACE_S = 5.0
POLL_S = 0.1
LINE_S = 1.0
SETTLE_TIMEOUT_S = 120.0
NODES_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 6.0
LEDGERS_AT_ONCE = 20


@click.command()
@click.option("--ledgers", default=300, show_default=True, type=click.IntRange(min=10))
@click.option("--bookies", default=6, show_default=True, type=click.IntRange(min=6))
@click.option("--nodes", default=3, show_default=True, type=click.IntRange(min=2))
@click.option("--bookkeeper", help="Version of the bookies.")
@click.option("--data", type=Folder(), help="Keep data and logs in this folder.")
def demo(ledgers: int, bookies: int, nodes: int, bookkeeper: str | None, data: Path | None) -> None:
    """Kill a bookie, watch the repair, and verify every copy.

    The demo runs twice, each time on a new cluster on loopback. In the second run the leading
    daemon is killed too. It needs Java 17 or later.

    Exit code 0: no acknowledged entry was lost, and everything that can be repaired was repaired.
    """
    base = data or Path(tempfile.mkdtemp(prefix="bookmender-demo-"))
    is_over, verdicts = False, list[bool]()
    try:
        for number, folder in enumerate(("bookie-lost", "leader-lost-too"), start=1):
            kills_leader = number == 2
            what = "a bookie and the leading daemon are" if kills_leader else "a bookie is"
            click.secho(f"\nRun {number}: {what} killed", bold=True)
            run = Run(
                data=base / folder,
                ledger_count=ledgers,
                bookie_count=bookies,
                node_count=nodes,
                kills_leader=kills_leader,
            )
            run.go(bookkeeper)
            verdicts.append(run.report())
        is_over = all(verdicts)
    except KeyboardInterrupt:
        is_over = True
        raise
    finally:
        if is_over and data is None:
            shutil.rmtree(base, ignore_errors=True)
        elif not is_over and any(base.rglob("*.log")):
            click.echo(f"data and logs of the clusters are kept in {base}", err=True)
    sys.exit(0 if all(verdicts) else 1)


@dataclass(slots=True, kw_only=True)
class Run:
    """One run, and its result. Times are in seconds since the bookie was killed; None for events
    that have not happened."""

    data: Path
    ledger_count: int
    bookie_count: int
    node_count: int
    kills_leader: bool
    """The leading daemon is killed as well, during the repairs."""
    began_s: float = field(default_factory=time.monotonic)
    nodes: list[Child] = field(default_factory=list)
    bookie_gone_s: float | None = None
    """The bookie's znode was deleted, after ZooKeeper's session timeout."""
    first_mark_s: float | None = None
    whole_s: float | None = None
    marked_max: int = 0
    repaired_ledgers: int = 0
    repaired_entries: int = 0
    repaired_bytes: int = 0
    problems: list[str] = field(default_factory=list)
    """What a user would report. There should be none."""
    proofs: list["LedgerProof"] = field(default_factory=list)

    def say(self, text: str) -> None:
        click.echo(f"[{time.monotonic() - self.began_s:5.1f} s] {text}")

    def go(self, bookkeeper: str | None) -> None:
        """Raises UnavailableError if the cluster does not start or is not repaired in time."""
        servers = f"ZooKeeper and {self.bookie_count} bookies"
        self.say(f"starting {servers} (session timeout {SESSION_TIMEOUT_S:g} s)")
        progress = Line(due_s=math.inf)  # shown on a terminal only
        with LocalCluster.start(  # in this thread, which receives Ctrl-C
            self.data,
            bookies=self.bookie_count,
            bookkeeper=bookkeeper,
            session_timeout_s=SESSION_TIMEOUT_S,
            on_event=lambda event: progress.write(event, now_s=0),
        ) as cluster:
            progress.erase()
            asyncio.run(self._go_on(cluster))

    async def _go_on(self, cluster: LocalCluster) -> None:
        rng = random.Random(SEED)
        settings = Settings(metadata_service_uri=cluster.metadata_service_uri)
        async with admin_session(settings) as session, open_workload(session, rng) as workload:
            try:
                self.say(f"writing {self.ledger_count} ledgers")
                await workload.write(self.ledger_count, open_count=LEFT_OPEN)
                self.say(f"starting {self.node_count} daemons (open-ledger grace {GRACE_S:g} s)")
                self.nodes = start_nodes(
                    self.data,
                    self.node_count,
                    {
                        "BOOKMENDER_METADATA_SERVICE_URI": cluster.metadata_service_uri,
                        "BOOKMENDER_REPLICATION_OPEN_LEDGER_GRACE_S": f"{GRACE_S:g}",
                        # The disk of a laptop is often nearly full; the bookies tolerate that too.
                        "BOOKMENDER_REPLICATION_FREE_DISK_SHARE_MIN": "0",
                        "BOOKMENDER_ZOOKEEPER_SESSION_TIMEOUT_S": f"{SESSION_TIMEOUT_S:g}",
                    },
                )
                await self._wait_for_nodes(session)
                killed = rng.choice(cluster.bookies)
                self.say(f"killing bookie {killed} (SIGKILL)")
                cluster.kill(killed)
                await self._watch_until_whole(session, killed)
            finally:
                await asyncio.to_thread(stop_all, self.nodes, timeout_s=STOP_TIMEOUT_S)
            for node in self.nodes:
                self._add_log(node)
            self.say("reading every copy of every entry")
            self.proofs = await prove(workload.written, workload, down=frozenset({killed}))

    async def _wait_for_nodes(self, session: AdminSession) -> None:
        """Wait until both services of each node are registered and one auditor leads."""
        deadline_s = time.monotonic() + NODES_TIMEOUT_S
        services = (await gather_status(session)).services
        while len(services.nodes) < 2 * self.node_count or services.leader is None:
            if time.monotonic() > deadline_s:
                raise self._too_late("the daemons were not ready", NODES_TIMEOUT_S)
            await asyncio.sleep(POLL_S)
            services = (await gather_status(session)).services

    async def _watch_until_whole(self, session: AdminSession, killed: BookieId) -> None:
        """Watch from outside, in ZooKeeper, until all ledgers are repaired."""
        began_s, said_s, is_leader_to_die = time.monotonic(), 0.0, self.kills_leader
        while self.whole_s is None:
            await asyncio.sleep(POLL_S)
            status = await gather_status(session)
            queue, now_s = status.queue, time.monotonic() - began_s
            self.marked_max = max(self.marked_max, queue.marked_count)
            if killed not in (*status.bookies.writable, *status.bookies.read_only):
                self.bookie_gone_s = self.bookie_gone_s or now_s
            if queue.marked_count:
                self.first_mark_s = self.first_mark_s or now_s
                leader = status.services.leader_node
                for node in self.nodes if is_leader_to_die else ():
                    if leader is not None and node.pid == leader.pid:
                        self.say(f"killing the leader, {node.name} (SIGKILL)")
                        node.kill()
                        is_leader_to_die = False
            # An empty queue alone would prove nothing, because the marks may not exist yet.
            elif not (await scan_ledgers(session.manager, lost=[killed])).underreplicated:
                self.whole_s = now_s
            if self.whole_s is not None or now_s - said_s >= LINE_S:
                said_s = now_s
                self.say(
                    f"{now_s:6.1f} s  leader {status.services.leader or 'none':<18} marked "
                    f"{queue.marked_count:>4}  under repair {queue.locked_count:>3}"
                )
            if now_s > SETTLE_TIMEOUT_S:
                raise self._too_late("not all ledgers were repaired", SETTLE_TIMEOUT_S)

    def _too_late(self, what: str, timeout_s: float) -> UnavailableError:
        return UnavailableError(f"{what} after {timeout_s:g} s; see the logs in {self.data}/logs")

    def _add_log(self, node: Child) -> None:
        """Add the events that a daemon has logged."""
        for line in node.log.read_text(errors="replace").splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                self.problems.append(f"{node.name}: {line}")
                continue
            if event.get("event") == "ledger.repaired":
                self.repaired_ledgers += 1
                self.repaired_entries += event.get("entry_count", 0)
                self.repaired_bytes += event.get("entry_bytes", 0)
            elif event.get("level") == "error":
                self.problems.append(f"{node.name}: {event.get('event')} {event.get('error', '')}")

    def report(self) -> bool:
        """Print the figures and the verdict. Return True if the run went well."""
        proofs = self.proofs
        first_mark_s, whole_s = self.first_mark_s or 0.0, self.whole_s or 0.0
        busy_s = max(whole_s - first_mark_s, 0.1)
        click.echo(
            f"  ledgers  {len(proofs)} written, {self.marked_max} marked at once, "
            f"{self.repaired_ledgers} repaired, {self.repaired_entries} entries "
            f"({self.repaired_bytes / 1e6:.1f} MB) copied\n"
            f"  entries  {sum(proof.written.acknowledged for proof in proofs)} acknowledged, "
            f"{sum(len(p.lost) for p in proofs)} lost, {sum(len(p.wrong) for p in proofs)} wrong\n"
            f"  copies   {sum(proof.copies_good for proof in proofs)} of "
            f"{sum(proof.copies_expected for proof in proofs)} that the metadata names exist and "
            "are good\n"
            f"  times    from the kill: znode gone {self.bookie_gone_s or 0:.1f} s, "
            f"first mark {first_mark_s:.1f} s, whole {whole_s:.1f} s\n"
            f"  rates    {self.repaired_ledgers / busy_s:.0f} ledgers/s, "
            f"{self.repaired_entries / busy_s:.0f} entries/s from the first mark to whole"
        )
        self.problems += [problem for proof in proofs for problem in proof.problems()]
        if not self.repaired_ledgers:
            self.problems.append("no ledger was repaired: the run proves nothing")
        for problem in self.problems:
            click.secho(f"  PROBLEM  {problem}", fg="red")
        is_good = not self.problems
        verdict = (
            "WHOLE: no entry is lost, and every ledger is repaired" if is_good else "NOT WHOLE"
        )
        click.secho(f"  verdict  {verdict}", bold=True, fg="green" if is_good else "red")
        return is_good


def start_nodes(
    data: Path, count: int, settings: Mapping[str, str], *, config: Path | None = None
) -> list[Child]:
    """Start daemons, each a separate process with its log below ``data``. ``settings``: environment
    variables that override those of this process. ``config``: the file of their settings, never
    that of the user or the host."""
    given = {k: v for k, v in os.environ.items() if not k.startswith("BOOKMENDER_")}
    given |= {
        "BOOKMENDER_LOG_FORMAT": "json",
        "BOOKMENDER_LOG_LEVEL": "debug",
        "BOOKMENDER_HTTP_PORT": "0",  # several nodes share this machine's ports
        **settings,
    }
    return [
        Child(
            name,
            [sys.executable, "-m", "daemon", "daemon", "--config", str(config or os.devnull)],
            log=data / "logs" / f"{name}.log",
            environment={**given, "BOOKMENDER_NODE_STATE_DIR": str(data / name)},
        )
        for name in (f"node-{number}" for number in range(1, count + 1))
    ]


@dataclass(slots=True)
class LedgerProof:
    """The result for one ledger. ``lost``: acknowledged entries that no bookie can return."""

    written: Written
    metadata: LedgerMetadata
    copies_expected: int = 0
    copies_good: int = 0
    lost: list[int] = field(default_factory=list)
    wrong: list[int] = field(default_factory=list)
    """Entries whose payload differs from what was written."""
    out_of_reach: list[int] = field(default_factory=list)
    """Acknowledged entries whose only copies are on bookies that are down."""

    def problems(self) -> list[str]:
        """Return what a user would report; empty for a good ledger."""
        ledger = f"ledger {self.written.ledger_id}"
        kinds = {"lost": self.lost, "not as written": self.wrong}
        kinds["only on the killed bookie"] = self.out_of_reach
        found = [f"{ledger}: entries {what}: {ids[:5]} …" for what, ids in kinds.items() if ids]
        if self.copies_good != self.copies_expected:
            found.append(f"{ledger}: {self.copies_good} of {self.copies_expected} copies")
        return found


async def prove(
    written: Sequence[Written], workload: Workload, *, down: frozenset[BookieId] = frozenset()
) -> list[LedgerProof]:
    """Read all ledgers that were written. ``down``: the bookies that were killed and not started
    again."""
    slots = asyncio.Semaphore(LEDGERS_AT_ONCE)
    return await asyncio.gather(*(_prove(each, workload, down, slots) for each in written))


async def _prove(
    written: Written, workload: Workload, down: frozenset[BookieId], slots: asyncio.Semaphore
) -> LedgerProof:
    async with slots:
        versioned = await workload.manager.read(written.ledger_id)
        proof = LedgerProof(written=written, metadata=versioned.metadata)
        opened = await find_end(versioned, bookies=workload.bookies, clock=workload.clock)
        ledger_id, digest = written.ledger_id, opened.digest
        for fragment in fragments(ledger_id, proof.metadata, lac=opened.lac):
            if fragment.last_entry_id is None:  # open: which copies it should have is not decided
                continue
            for index, bookie in enumerate(fragment.ensemble):
                entries = fragment.entries_of(index)
                proof.copies_expected += len(entries)
                if bookie in down:
                    continue
                for entry_ids in transfer_slices([entries]):
                    wanted = Transfer(ledger_id=ledger_id, digest=digest, reads={bookie: entry_ids})
                    proof.copies_good += (await workload.bookies.transfer(wanted)).entry_count
        await _read_as_applications_do(proof, opened, workload, down)
    return proof


async def _read_as_applications_do(
    proof: LedgerProof, opened: OpenedLedger, workload: Workload, down: frozenset[BookieId]
) -> None:
    """Read every acknowledged entry through the reader of applications."""
    written, digest, metadata = proof.written, opened.digest, opened.metadata
    last = written.acknowledged - 1
    if metadata.is_closed and opened.lac < last:
        proof.lost += range(opened.lac + 1, last + 1)
        last = opened.lac
    reader = LedgerReader(
        written.ledger_id, metadata, digest=digest, bookies=workload.bookies, clock=workload.clock
    )
    for entry_id in range(last + 1):
        segment = metadata.segment_of(entry_id)
        holders = replicas_in(segment, entry_id, write_quorum=metadata.write_quorum)
        if down.issuperset(holders):
            proof.out_of_reach.append(entry_id)
            continue
        try:
            entry = await reader.read(entry_id)
        except BookmenderError:
            proof.lost.append(entry_id)
            continue
        if digest.payload(entry) != written.payload(entry_id):
            proof.wrong.append(entry_id)
