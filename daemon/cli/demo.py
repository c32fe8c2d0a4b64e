"""``bookmender local demo``: kills one of several real bookies and proves that no entry was lost.

``Demo`` creates a cluster, writes ledgers, starts nodes, kills a bookie and then the leading node,
and waits for all repairs. ``prove`` then reads every copy of every entry from every bookie that the
metadata names. It uses nothing that the nodes reported: it reads metadata and entries itself,
verifies digests, and compares the payloads of each ledger with what was written.
"""

import asyncio
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
from daemon.status.state import Services
from daemon.words import counted
from ledgers.bookies import Transfer
from ledgers.errors import BookmenderError, UnavailableError
from ledgers.model import BookieId, LedgerMetadata, fragments, known_fragments
from ledgers.reading import LedgerReader, find_end
from replication.copy_reader import transfer_slices

SEED = 1
LEFT_OPEN = 5
SESSION_TIMEOUT_S = 4.0
GRACE_S = 5.0
POLL_S = 0.1
SETTLE_TIMEOUT_S = 120.0
NODES_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 6.0
LEDGERS_AT_ONCE = 20

NEXT = """
Next: `make demo ARGS=--keep` leaves all this running, to look at its page and to
try commands. Without make: `bookmender local demo --keep`."""
KEPT = """
It runs until Ctrl-C, which deletes it. Its page: {page}
For commands in another terminal:
  export BOOKMENDER_METADATA_SERVICE_URI=\\
{uri}
  {command} status"""


@click.command()
@click.option(
    "--ledgers",
    default=200,
    show_default=True,
    type=click.IntRange(min=10),
    help="Number of ledgers.",
)
@click.option(
    "--bookies",
    default=5,
    show_default=True,
    type=click.IntRange(min=4),
    help="Number of bookies.",
)
@click.option(
    "--nodes", default=3, show_default=True, type=click.IntRange(min=2), help="Number of nodes."
)
@click.option("--bookkeeper", help="Version of the bookies.")
@click.option("--keep", is_flag=True, help="Leave everything running at the end, until Ctrl-C.")
@click.option("--data", type=Folder(), help="Keep data and logs in this folder.")
def demo(
    ledgers: int, bookies: int, nodes: int, bookkeeper: str | None, keep: bool, data: Path | None
) -> None:
    """Kill a bookie and watch the repair.

    It also kills the leading node, and then verifies every copy of every entry. It takes about a
    minute, on a new cluster on loopback, and needs Java 17 or later. Ctrl-C stops and deletes
    everything.

    Exit code 0: no acknowledged entry was lost, and everything that can be repaired was repaired.
    """
    folder = data or Path(tempfile.mkdtemp(prefix="bookmender-demo-"))
    run = Demo(data=folder, ledger_count=ledgers, bookie_count=bookies, node_count=nodes)
    is_good = is_interrupted = False
    try:
        is_good = run.go(bookkeeper, is_kept=keep)
    except KeyboardInterrupt:
        is_interrupted = True
        click.echo("\ninterrupted; everything is stopped", err=True)
        raise
    finally:
        if data is None and (is_good or is_interrupted):
            shutil.rmtree(folder, ignore_errors=True)
        else:
            click.echo(f"data and logs are kept in {folder}", err=True)
    sys.exit(0 if is_good else 1)


@dataclass(slots=True, kw_only=True)
class Demo:
    """One run, and its result. Times are monotonic."""

    data: Path
    ledger_count: int
    bookie_count: int
    node_count: int
    began_s: float = field(default_factory=time.monotonic)
    line: Line = field(default_factory=lambda: Line(stream=sys.stdout))
    nodes: list[Child] = field(default_factory=list)
    killed_s: float = 0.0
    whole_s: float = 0.0
    affected_count: int = 0
    lost_copies: int = 0
    lost_bytes: int = 0
    proofs: list["LedgerProof"] = field(default_factory=list)

    def say(self, text: str) -> None:
        self.line.erase()
        click.echo(f"{time.monotonic() - self.began_s:6.1f} s  {text}")

    def show(self, text: str) -> None:
        """Show a state that the next one replaces; in a file or a pipe, one every ten seconds."""
        now_s = time.monotonic()
        self.line.write(f"{now_s - self.began_s:6.1f} s  {text}", now_s=now_s)

    def go(self, bookkeeper: str | None, *, is_kept: bool) -> bool:
        """Return True if no entry is lost and each has all its copies. Raises UnavailableError if
        the cluster does not start or is not repaired in time."""
        self.say(f"starting ZooKeeper and {self.bookie_count} bookies in {self.data}")
        with LocalCluster.start(  # in this thread, which receives Ctrl-C
            self.data,
            bookies=self.bookie_count,
            bookkeeper=bookkeeper,
            session_timeout_s=SESSION_TIMEOUT_S,
            on_event=self.show,
        ) as cluster:
            try:
                asyncio.run(self._run(cluster))
                is_good = self._report()
                if is_kept:
                    self._keep(cluster.metadata_service_uri)
                else:
                    click.echo(NEXT)
            except KeyboardInterrupt:  # nothing that the servers could save is needed
                stop_all(self.nodes, timeout_s=0)
                cluster.stop(timeout_s=0)
                raise
            finally:
                stop_all(self.nodes, timeout_s=STOP_TIMEOUT_S)
        return is_good

    def _keep(self, uri: str) -> None:
        """Tell what to look at, and return after Ctrl-C."""
        installed = shutil.which("bookmender")
        command = "bookmender" if installed else os.path.relpath(sys.argv[0])
        pages = [page for node in self.nodes if node.is_running and (page := page_of(node))]
        click.echo(KEPT.format(page=pages[0], uri=uri, command=command))
        try:
            signal.pause()
        except KeyboardInterrupt:
            click.echo()

    async def _run(self, cluster: LocalCluster) -> None:
        rng, uri = random.Random(SEED), cluster.metadata_service_uri
        settings = Settings(metadata_service_uri=uri)
        async with admin_session(settings) as session, open_workload(session, rng) as workload:
            self.nodes = start_nodes(
                self.data,
                self.node_count,
                {
                    "BOOKMENDER_METADATA_SERVICE_URI": uri,
                    "BOOKMENDER_REPLICATION_OPEN_LEDGER_GRACE_S": f"{GRACE_S:g}",
                    # The disk of a laptop is often nearly full; the bookies tolerate that too.
                    "BOOKMENDER_REPLICATION_FREE_DISK_SHARE_MIN": "0",
                    "BOOKMENDER_ZOOKEEPER_SESSION_TIMEOUT_S": f"{SESSION_TIMEOUT_S:g}",
                },
            )
            self.say(
                f"starting {', '.join(node.name for node in self.nodes)}; writing "
                f"{self.ledger_count} ledgers, {LEFT_OPEN} left open"
            )
            await workload.write(self.ledger_count, open_count=LEFT_OPEN)
            leader = await self._wait_for_nodes(session)
            other = next(node for node in self.nodes if node is not leader)
            self.say(f"{leader.name} leads; the page of {other.name} is {page_of(other)}")
            killed = rng.choice(cluster.bookies)
            await self._count_copies(workload, killed)
            self.killed_s = time.monotonic()
            cluster.kill(killed)
            self.say(f"killed bookie {killed} (kill -9), which is in {self.affected_count} ledgers")
            await self._watch_until_whole(session, killed)
            self.say("reading every copy of every entry")
            self.proofs = await prove(workload.written, workload)

    async def _wait_for_nodes(self, session: AdminSession) -> Child:
        """Wait until both services of each node are registered. Return the node that leads."""
        deadline_s = time.monotonic() + NODES_TIMEOUT_S
        while True:
            services = (await gather_status(session)).services
            leader = self._leader(services)
            if leader is not None and len(services.nodes) >= 2 * self.node_count:
                return leader
            if time.monotonic() > deadline_s:
                raise self._too_late("the nodes were not ready", NODES_TIMEOUT_S)
            await asyncio.sleep(POLL_S)

    async def _count_copies(self, workload: Workload, bookie: BookieId) -> None:
        """Count the copies that are on the bookie."""
        for written in workload.written:
            metadata = (await workload.manager.read(written.ledger_id)).metadata
            known = known_fragments(written.ledger_id, metadata, lac=written.acknowledged - 1)
            there = [f for f in known if bookie in f.ensemble]
            copies = sum(len(f.entries_of(f.ensemble.index(bookie))) for f in there)
            self.affected_count += bool(there)
            self.lost_copies += copies
            self.lost_bytes += copies * written.shape.entry_bytes

    async def _watch_until_whole(self, session: AdminSession, killed: BookieId) -> None:
        """Watch in ZooKeeper until all ledgers are repaired. Kill the leader once there are marks,
        and say who leads next."""
        leader, is_gone, is_leader_killed = "", False, False
        while True:
            status = await gather_status(session)
            queue = status.queue
            elected = self._leader(status.services)
            if not is_gone and killed not in status.bookies.writable:
                is_gone = True
                self.say("the bookie's ZooKeeper session has expired: the bookie is lost")
            if queue.marked_count and not is_leader_killed and elected and elected.is_running:
                is_leader_killed, leader = True, elected.name
                elected.kill()
                self.say(
                    f"{counted(queue.marked_count, 'ledger')} marked, {queue.locked_count} of them "
                    f"under repair; killed {leader}, too"
                )
            elif is_leader_killed and elected is not None and elected.name != leader:
                leader = elected.name
                self.say(f"{leader} leads now")
            # An empty queue alone would prove nothing, because the marks may not exist yet.
            if is_gone and not queue.marked_count:
                scan = await scan_ledgers(session.manager, lost=[killed])
                if not scan.underreplicated:
                    self.whole_s = time.monotonic()
                    return
            self.show(f"{queue.marked_count} marked, {queue.locked_count} under repair")
            if time.monotonic() - self.killed_s > SETTLE_TIMEOUT_S:
                raise self._too_late("not all ledgers were repaired", SETTLE_TIMEOUT_S)
            await asyncio.sleep(POLL_S)

    def _leader(self, services: Services) -> Child | None:
        info = services.leader_node
        return next((node for node in self.nodes if info and node.pid == info.pid), None)

    def _too_late(self, what: str, timeout_s: float) -> UnavailableError:
        return UnavailableError(f"{what} after {timeout_s:g} s; see the logs in {self.data}/logs")

    def _report(self) -> bool:
        """Print the figures and the verdict. Return True if the run went well."""
        self.line.erase()
        proofs, problems = self.proofs, [p for proof in self.proofs for p in proof.problems()]
        repairers = set[str]()
        for node in self.nodes:
            for event in events(node):
                if event["event"] == "ledger.repaired":
                    repairers.add(node.name)
                elif event["level"] == "error":
                    problems.append(f"{node.name}: {event['event']} {event.get('error', '')}")
        if not repairers:
            problems.append("no ledger was repaired: the run proves nothing")
        closed = [proof for proof in proofs if proof.metadata.is_closed]
        entries = sum(proof.written.acknowledged for proof in proofs)
        good = sum(proof.copies_good for proof in closed)
        expected = sum(proof.copies_expected for proof in closed)
        figures = {
            "written": f"{entries:,} entries in {len(proofs)} ledgers, with 2 or 3 copies of each",
            "lost": f"{self.lost_copies:,} copies ({self.lost_bytes / 1e6:.1f} MB) in "
            f"{self.affected_count} ledgers, with the killed bookie",
            "copied": f"by {', '.join(sorted(repairers))}: no ledger names the killed bookie now",
            "time": f"{self.whole_s - self.killed_s:.1f} s from the kill, with the waits for the "
            f"two sessions to expire\n{'':9}({SESSION_TIMEOUT_S:g} s each) and for writers of "
            f"open ledgers ({GRACE_S:g} s)",
            "checked": f"{good:,} of the {expected:,} copies in the {len(closed)} closed ledgers "
            f"are good\n{'':9}{entries:,} entries read as by an application, and compared",
            "open": f"{len(proofs) - len(closed)} of the {LEFT_OPEN} open ledgers stay open: their "
            "copies are not counted",
        }
        click.echo()
        for name, text in figures.items():
            click.echo(f"{name:<8} {text}")
        for problem in problems:
            click.secho(f"PROBLEM  {problem}", fg="red")
        is_good = not problems
        verdict = (
            "WHOLE: no entry is lost, closed ledgers have all copies" if is_good else "NOT WHOLE"
        )
        click.secho(f"verdict  {verdict}", bold=True, fg="green" if is_good else "red")
        return is_good


def page_of(node: Child) -> str:
    """Return the address of the node's page; empty until the node listens."""
    ports = (event["port"] for event in events(node) if event["event"] == "http.listening")
    return next((f"http://127.0.0.1:{port}/" for port in ports), "")


def events(node: Child) -> Iterator[dict[str, Any]]:
    """Return what the node has logged. A line that is no log event becomes an error."""
    for line in node.log.read_text(errors="replace").splitlines(keepends=True):
        try:
            yield json.loads(line)
        except ValueError:
            if line.endswith("\n"):  # otherwise it is not complete yet
                yield {"level": "error", "event": line.strip()}


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

    def problems(self) -> list[str]:
        """Return what a user would report; empty for a good ledger."""
        ledger = f"ledger {self.written.ledger_id}"
        kinds = {"lost": self.lost, "not as written": self.wrong}
        found = [f"{ledger}: entries {what}: {ids[:5]} …" for what, ids in kinds.items() if ids]
        if self.copies_good != self.copies_expected:
            found.append(f"{ledger}: {self.copies_good} of {self.copies_expected} copies")
        return found


async def prove(written: Sequence[Written], workload: Workload) -> list[LedgerProof]:
    """Read all ledgers that were written."""
    slots = asyncio.Semaphore(LEDGERS_AT_ONCE)

    async def prove_one(each: Written) -> LedgerProof:
        async with slots:
            return await _prove(each, workload)

    return await asyncio.gather(*map(prove_one, written))


async def _prove(written: Written, workload: Workload) -> LedgerProof:
    """Read each copy in bulk, then each acknowledged entry as applications do."""
    versioned = await workload.manager.read(written.ledger_id)
    ledger_id, metadata = written.ledger_id, versioned.metadata
    proof = LedgerProof(written=written, metadata=metadata)
    opened = await find_end(versioned, bookies=workload.bookies, clock=workload.clock)
    for fragment in fragments(ledger_id, metadata, lac=opened.lac):
        if fragment.last_entry_id is None:  # open: which copies it should have is not decided
            continue
        for index, bookie in enumerate(fragment.ensemble):
            entries = fragment.entries_of(index)
            proof.copies_expected += len(entries)
            for ids in transfer_slices([entries]):
                wanted = Transfer(ledger_id=ledger_id, digest=opened.digest, reads={bookie: ids})
                proof.copies_good += (await workload.bookies.transfer(wanted)).entry_count
    reader = LedgerReader(
        ledger_id, metadata, digest=opened.digest, bookies=workload.bookies, clock=workload.clock
    )
    for entry_id in range(written.acknowledged):
        try:
            if metadata.is_closed and entry_id > opened.lac:
                raise UnavailableError("the ledger was closed before this entry")
            entry = await reader.read(entry_id)
        except BookmenderError:
            proof.lost.append(entry_id)
        else:
            if opened.digest.payload(entry) != written.payload(entry_id):
                proof.wrong.append(entry_id)
    return proof
