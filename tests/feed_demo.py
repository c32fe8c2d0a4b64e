"""Kill everything that the change feed consists of: ``make feed-demo``, about two minutes.

Java's client creates, writes, closes and deletes ledgers all the time. A bookie is killed, and
three nodes repair its ledgers. For a minute the leader is killed or frozen past its session, and
programs that follow the feed are killed, all at random. Then all becomes quiet. In the end the
catalogue of each follower must equal the metadata in ZooKeeper, ledger by ledger.

Exit code 0: it does; 1: it does not, or something else was not as expected; 2: a program is
missing.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, aclosing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from checkpoints.chain import FeedChain, read_chain
from checkpoints.feed_ledgers import FeedLedgers, PublishedVersions
from checkpoints.model import Checkpoint, ledger_id_of
from daemon.local.cluster import LocalCluster
from daemon.local.jars import BOOKKEEPER_DEFAULT
from daemon.local.java import Java
from daemon.local.processes import Child, stop_all
from daemon.operations.feed import read_clients
from ledgers.clock import SystemClock
from ledgers.errors import SettingsError
from ledgers.model import BookieId
from ledgers.tasks import task_scope
from replication.marks import marked_ledger_ids
from tests.cluster.commands import bookmender
from tests.cluster.steps import STOP_TIMEOUT_S, Bench, bench, errors, leading_pid, nodes, wait_for
from tests.demo import Say, SurpriseError, logs_kept, run_demo, teller
from tests.feed_followers import (
    SHOWN_MAX,
    Catalogue,
    Follower,
    Known,
    difference_text,
    differing,
    failing_file,
    followers,
    read_zookeeper,
)
from tests.java.build import compiled_classes
from tests.java.messages import Shape, Verdict
from tests.java.tool import JavaChanger, JavaTool
from tests.postgresql_server import running_postgresql

BOOKIES, NODES = 5, ("node-1", "node-2", "node-3")
SESSION_TIMEOUT_S = 4.0
"""Of the bookies."""
SETTINGS = {"LOG_LEVEL": "info", "REPLICATION_OPEN_LEDGER_GRACE_S": "3"}
SHAPE = Shape(ensemble_size=3, write_quorum=3, ack_quorum=2, sizes=(100,))
THREADS, PAUSE_MS, KEEP = 3, 150, 40
"""Of Java's client: about 15 changes a second; in the end 200 ledgers exist."""
LEDGERS_BEFORE = 60
"""Ledgers that exist before the feed is enabled."""
BOOKIE_KILLED_AFTER_S = 5.0
LEADER_LEFT_S, FOLLOWER_LEFT_S = (3.0, 8.0), (0.5, 8.0)
"""Times that a leader and a follower run between two kills."""
DOWN_S = (0.0, 3.0)
"""Time after which a killed program is started again."""
FROZEN_ON_S = (0.0, 2.0)
"""Time that a frozen leader stays frozen after another node leads."""
LINE_S = 5.0
READY_TIMEOUT_S = 60.0
QUIET_TIMEOUT_S = 120.0
CALM_S = 3.0
"""The catalogues are compared again after this time, because nothing may change any more."""
FILES = ("*.txt", "*.db*")
"""The catalogues and receipts of the followers."""
CLOCK = SystemClock()


def main() -> None:
    parser = argparse.ArgumentParser(prog="make feed-demo ARGS=")
    parser.add_argument("--seed", type=int, help="of all random choices; another one by default")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="how long programs are killed; 60 by default"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("build/feed-demo"),
        help="folder for the logs after a failure",
    )
    options = parser.parse_args()
    seed = random.randrange(2**32) if options.seed is None else options.seed
    run_demo("feed-demo", partial(_run, seed, options.seconds, options.output.resolve()))


def _run(seed: int, storm_s: float, output: Path) -> None:
    compiled_classes(BOOKKEEPER_DEFAULT, Java.find())  # an error without compiler comes at once
    say = teller()
    say(f"seed {seed}; the same again: make feed-demo ARGS='--seed {seed}'")
    with TemporaryDirectory(prefix="feed-demo-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with logs_kept(folder, output, *FILES), _postgresql(say) as postgresql:
            say(f"starting ZooKeeper and {BOOKIES} bookies")
            with LocalCluster.start(
                folder / "cluster", bookies=BOOKIES, session_timeout_s=SESSION_TIMEOUT_S
            ) as cluster:
                asyncio.run(_run_on(cluster, folder, postgresql, seed, storm_s, say))
            say("all processes are stopped; deleting their files")
    say("done: every catalogue equals ZooKeeper")


@contextmanager
def _postgresql(say: Say) -> Iterator[str | None]:
    """Yield the URL of a database; None if PostgreSQL is not installed."""
    with ExitStack() as stack:
        url = None
        try:
            url = stack.enter_context(running_postgresql())
        except SettingsError:
            say("PostgreSQL is not installed, so no follower has its receipts there")
        yield url


async def _run_on(
    cluster: LocalCluster,
    folder: Path,
    postgresql: str | None,
    seed: int,
    storm_s: float,
    say: Say,
) -> None:
    uri = cluster.metadata_service_uri
    following = followers(uri, folder, postgresql=postgresql)
    async with bench(uri) as on, nodes(uri, folder) as start_node:
        try:
            with JavaChanger(uri, SHAPE, threads=THREADS, pause_ms=PAUSE_MS, keep=KEEP) as java:
                demo = Demo(
                    cluster=cluster,
                    on=on,
                    nodes=DemoNodes(on=on, folder=folder, start_node=start_node),
                    following=following,
                    java=java,
                    folder=folder,
                    seed=seed,
                    storm_s=storm_s,
                    say=say,
                )
                await demo.run()
        finally:
            for follower in following:
                follower.stop()


@dataclass(slots=True, kw_only=True)
class DemoNodes:
    """The nodes, by name, which are started again after they were killed."""

    on: Bench
    folder: Path
    start_node: Callable[..., Child]
    program: str = "tests.feed_node"
    running: dict[str, Child] = field(default_factory=dict)
    ever: list[Child] = field(default_factory=list)

    def start(self, name: str) -> None:
        settings = SETTINGS | {"NODE_STATE_DIR": str(self.folder / name)}
        child = self.start_node(
            f"{name}.{len(self.ever)}", command=(self.program, "daemon"), settings=settings
        )
        self.running[name] = child
        self.ever.append(child)

    async def leader(self) -> str | None:
        """Return the name of the node that leads."""
        pid = await leading_pid(self.on.seen.store, self.on.seen.paths)
        return next((name for name, node in self.running.items() if node.pid == pid), None)

    async def wait_leader(self, *, other_than: str | None = None) -> str:
        async def leads() -> str | None:
            leader = await self.leader()
            return None if leader == other_than else leader

        found = await wait_for(leads, "leader", within_s=READY_TIMEOUT_S)
        return str(found)

    async def become_usual(self) -> None:
        """Start all nodes again, as users do. They begin no log ledgers and bases for hours."""
        await asyncio.to_thread(stop_all, list(self.running.values()), timeout_s=STOP_TIMEOUT_S)
        self.program = "daemon"
        for name in NODES:
            self.start(name)

    def ended(self) -> list[str]:
        """Return the nodes that ended by themselves, which no node should do."""
        return [name for name, node in self.running.items() if not node.is_running]

    def errors(self) -> list[str]:
        """Return what the nodes logged as errors. The last line of a killed node may be cut."""
        found = [error for node in self.ever for error in errors(node)]
        return [str(each) for each in found if not str(each.get("line", "")).startswith("{")]


@dataclass(slots=True, kw_only=True)
class Demo:
    """``storm_s``: how long programs are killed."""

    cluster: LocalCluster
    on: Bench
    nodes: DemoNodes
    following: list[Follower]
    java: JavaChanger
    folder: Path
    seed: int
    storm_s: float
    say: Say
    is_bookie_down: bool = False
    _ends_s: float = 0.0

    @property
    def victim(self) -> BookieId:
        return self.cluster.bookies[self.rng("bookie").randrange(BOOKIES)]

    def rng(self, name: str) -> random.Random:
        """Return the random choices of one task, which depend on the seed alone."""
        return random.Random(f"{self.seed} {name}")

    async def run(self) -> None:
        await self._begin()
        await self._storm()
        await self._become_quiet()
        await self._compare()
        await self._check_clients()
        await self._check_processes()
        await self._judge()

    async def _begin(self) -> None:
        self.say("Java's client creates, writes, closes and deletes ledgers")

        def has_begun() -> bool:
            self.java.read()
            return len(self.java.created) >= LEDGERS_BEFORE

        await wait_for(has_begun, f"{LEDGERS_BEFORE} ledgers")
        self.say(f"starting {', '.join(NODES)}")
        for name in NODES:
            self.nodes.start(name)
        self.say(f"{await self.nodes.wait_leader()} leads")
        await self._bookmender("feed", "enable")
        failing_file(self.folder).touch()
        self.say("starting the followers (the command of exec fails for every tenth ledger):")
        for follower in self.following:
            print(f"          {follower.name:<11} {follower.what}")
            follower.start()

        def know_some() -> bool:
            self.java.read()
            return all(follower.read()[0] for follower in self.following)

        await wait_for(know_some, "catalogue of each follower", within_s=READY_TIMEOUT_S)

    # --- The storm -------------------------------------------------------------------------------

    async def _storm(self) -> None:
        self.say(f"for {self.storm_s:g} s the leader and the followers are killed at random")
        self._ends_s = time.monotonic() + self.storm_s
        async with task_scope() as scope:
            tasks = [
                self._kill_bookie(),
                self._disturb_leaders(),
                *map(self._disturb, self.following),
                self._tell(),
            ]
            await asyncio.gather(*map(scope.start, tasks))

    async def _left(self, drawn_s: float) -> bool:
        """Wait this long. Return False if the storm is over, which ends the wait."""
        left_s = self._ends_s - time.monotonic()
        await asyncio.sleep(max(0.0, min(drawn_s, left_s)))
        return drawn_s < left_s

    async def _kill_bookie(self) -> None:
        if await self._left(BOOKIE_KILLED_AFTER_S):
            named = await self._named()
            self.say(f"killing bookie {self.victim} (SIGKILL), which {len(named)} ledgers name")
            self.cluster.kill(self.victim)
            self.is_bookie_down = True

    async def _disturb_leaders(self) -> None:
        rng = self.rng("leader")
        while await self._left(rng.uniform(*LEADER_LEFT_S)):
            leader = await self.nodes.wait_leader()
            if rng.random() < 0.6:
                await self._kill_leader(leader, down_s=rng.uniform(*DOWN_S))
            else:
                await self._freeze_leader(leader, on_s=rng.uniform(*FROZEN_ON_S))

    async def _kill_leader(self, leader: str, *, down_s: float) -> None:
        self.say(f"killing the leader, {leader} (SIGKILL)")
        self.nodes.running[leader].kill()
        await asyncio.sleep(down_s)
        self.nodes.start(leader)

    async def _freeze_leader(self, leader: str, *, on_s: float) -> None:
        """Freeze the leader until another one leads, and a moment longer."""
        self.say(f"freezing the leader, {leader} (SIGSTOP)")
        node = self.nodes.running[leader]
        node.pause()
        try:
            other = await self.nodes.wait_leader(other_than=leader)
            await asyncio.sleep(on_s)
        finally:
            node.resume()
        self.say(f"{other} leads; {leader} goes on (SIGCONT)")

    async def _disturb(self, follower: Follower) -> None:
        """Kill a follower, sometimes while it is frozen, or start a second one beside it."""
        rng = self.rng(follower.name)
        while await self._left(rng.uniform(*FOLLOWER_LEFT_S)):
            follower.require_running()
            drawn, down_s = rng.random(), rng.uniform(*DOWN_S)
            if drawn < 0.2 and follower.has_versions:
                follower.pause()
                follower.start()
                await asyncio.sleep(down_s)
                follower.resume()
                await wait_for(follower.has_fenced, f"fenced process of {follower.name}")
                continue
            if drawn < 0.4:
                follower.pause()
                await asyncio.sleep(rng.uniform(*DOWN_S))
            await asyncio.to_thread(follower.kill)
            await asyncio.sleep(down_s)
            follower.start()

    async def _tell(self) -> None:
        began_s = self._ends_s - self.storm_s
        while await self._left(LINE_S):
            self.java.read()
            there = await read_zookeeper(self.on.seen.manager)
            marked = await marked_ledger_ids(self.on.seen.store, self.on.seen.paths)
            kill_count = sum(each.kill_count for each in self.following)
            self.say(
                f"{time.monotonic() - began_s:2.0f} of {self.storm_s:g} s: "
                f"{await self.nodes.leader() or 'no node'} leads; {len(there)} ledgers, "
                f"{len(self.java.deleted)} deleted, {len(marked)} marked; "
                f"{kill_count} followers killed; "
                f"behind: {self._lags(there)}"
            )

    def _lags(self, there: Catalogue) -> str:
        """Return how many ledgers each follower lacks or knows otherwise."""
        counts = (f"{each.name} {len(differing(each.read()[0], there))}" for each in self.following)
        return ", ".join(counts)

    # --- The calm after it -----------------------------------------------------------------------

    async def _become_quiet(self) -> None:
        await asyncio.to_thread(self.java.stop)
        java = self.java
        self.say(
            f"Java's client has ended: {len(java.created)} ledgers created, {len(java.deleted)} "
            f"deleted, {len(java.failures)} steps failed"
        )
        await self.nodes.become_usual()
        self.say(f"all nodes were started again; {await self.nodes.wait_leader()} leads")
        if self.is_bookie_down:
            await wait_for(
                self._is_repaired,
                f"empty queue and no ledger that names {self.victim}",
                within_s=QUIET_TIMEOUT_S,
            )
            self.say(f"no ledger names {self.victim}, and the queue is empty")
        failing_file(self.folder).unlink()
        (store,) = [each.store for each in self.following if each.name == "exec"]
        *_, told = await self._bookmender("feed", "clients", "exec", "--retry", store=store)
        print(f"          {told}")

    async def _named(self) -> list[int]:
        """Return the ledgers that name the killed bookie."""
        found = []
        async for ledger_ids in self.on.seen.manager.ledger_ids():
            for ledger_id in ledger_ids:
                read = await self.on.seen.manager.find(ledger_id)
                if read is not None and self.victim in read.metadata.bookies:
                    found.append(ledger_id)
        return found

    async def _is_repaired(self) -> bool:
        return not await self._named() and await self.on.is_idle()

    async def _compare(self) -> None:
        """Compare each catalogue and the log itself with ZooKeeper, twice."""

        async def are_equal() -> bool:
            there = await read_zookeeper(self.on.seen.manager)
            return not any(differing(each.read()[0], there) for each in self.following)

        with suppress(AssertionError):  # the differences are told below
            await wait_for(are_equal, "equal catalogues", within_s=QUIET_TIMEOUT_S)
        await asyncio.sleep(CALM_S)
        there = await read_zookeeper(self.on.seen.manager)
        checkpoints = await self._logged()
        bad = {
            *self._report("log", applied(checkpoints), there, "all checkpoints of the log"),
            *self._report(
                "base", await self._published(), there, "the last base and the log after it"
            ),
        }
        for each in self.following:
            catalogue, told_count = each.read()
            told = f"{told_count} changes told, " if told_count else ""
            fenced = f", fenced {len(each.fenced)} times" if each.fenced else ""
            text = f"{each.what}: {told}killed {each.kill_count} times{fenced}"
            bad.update(self._report(each.name, catalogue, there, text))
            each.require_running()
        if bad:
            for ledger_id in sorted(bad)[:SHOWN_MAX]:
                self._tell_logged(ledger_id, checkpoints)
            raise SurpriseError(f"{len(bad)} ledgers differ")

    def _report(self, name: str, catalogue: Catalogue, there: Catalogue, text: str) -> list[int]:
        bad = differing(catalogue, there)
        result = f"{len(bad)} of {len(there)} DIFFER" if bad else f"{len(there)} ledgers equal"
        self.say(f"{name:<11} {result}  ({text})")
        for ledger_id in bad[:SHOWN_MAX]:
            print(f"          {difference_text(ledger_id, catalogue, there)}")
        return bad

    async def _logged(self) -> list[Checkpoint]:
        """Read all checkpoints in the log, oldest first. Raise SurpriseError if there is a gap."""
        found: list[Checkpoint] = []
        ledgers = FeedLedgers(self.on.seen.manager, self.on.workload.bookies, CLOCK)
        chain = await self._chain()
        previous_id = chain.logs[0].previous_id
        for segment in chain.logs:
            opened = await ledgers.open(segment.ledger_id)
            assert opened is not None, segment
            async with aclosing(ledgers.checkpoints(opened)) as checkpoints:
                async for checkpoint in checkpoints:
                    if checkpoint.previous_id != previous_id:
                        raise SurpriseError(
                            f"checkpoint {checkpoint.id:#x} follows {checkpoint.previous_id:#x}, "
                            f"but the log has {previous_id:#x} before it"
                        )
                    previous_id = checkpoint.id
                    found.append(checkpoint)
        self.say(f"the log: {len(chain.logs)} ledgers, {len(found)} checkpoints, no gap")
        return found

    async def _chain(self) -> FeedChain:
        chain = (await read_chain(self.on.seen.store, self.on.seen.paths)).value
        assert chain is not None
        return chain

    async def _published(self) -> Catalogue:
        """Return what the last base and the log after it tell, as a new leader reads them."""
        ledgers = FeedLedgers(self.on.seen.manager, self.on.workload.bookies, CLOCK)
        published = await PublishedVersions.read(await self._chain(), ledgers)
        versions = published.between(0, None)
        return {ledger_id: Known(version=version) for ledger_id, version in versions.items()}

    def _tell_logged(self, ledger_id: int, checkpoints: list[Checkpoint]) -> None:
        """Print what the log says of a ledger."""
        for checkpoint in checkpoints:
            for span in checkpoint.spans:
                if ledger_id_of(span.key) == ledger_id:
                    what = "deleted" if span.fingerprint is None else f"{span.fingerprint:016x}"
                    print(
                        f"          ledger {ledger_id}: checkpoint {checkpoint.id:#x} has "
                        f"{span.begin:#x} to {span.end:#x}, {what}"
                    )

    async def _check_clients(self) -> None:
        """Check that every client is connected and up to date, and that no failure is left."""

        async def lagging() -> list[str]:
            found = []
            for store in {each.store for each in self.following}:
                for row in (await read_clients(self.on.seen, store)).clients:
                    is_current = row.lag_checkpoints == 0
                    if not is_current or not row.is_connected or row.failure_count:
                        found.append(row.to_text())
            return found

        async def is_current() -> bool:
            return not await lagging()

        try:
            await wait_for(is_current, "clients that are up to date")
        except AssertionError as error:
            raise SurpriseError("; ".join(await lagging())) from error
        for line in await self._bookmender("feed", "clients"):
            print(f"          {line}")

    async def _check_processes(self) -> None:
        """Check that all nodes run and logged no error."""
        for name in self.nodes.ended():
            raise SurpriseError(f"{name} has ended by itself, see its log")
        if found := self.nodes.errors():
            raise SurpriseError(f"the nodes logged errors: {found}")

    async def _judge(self) -> None:
        """Ask Java which ledgers exist, and whether each copy is good."""
        uri, before = self.cluster.metadata_service_uri, await read_zookeeper(self.on.seen.manager)

        def ask() -> tuple[frozenset[int], Verdict, str]:
            with JavaTool() as tool:
                listed = tool.ledger_ids(uri)
                report = tool.judge(uri, listed & self.java.created)
                bad = [
                    each for each in report.ledgers.values() if each.verdict is not Verdict.WHOLE
                ]
                return listed, report.verdict, str(bad[:SHOWN_MAX])

        self.say("Java's client lists all ledgers, and reads every copy of its own")
        listed, verdict, bad = await asyncio.to_thread(ask)
        after = await read_zookeeper(self.on.seen.manager)
        # The leader goes on, and creates and deletes ledgers of the feed meanwhile.
        wrong = (before.keys() & after.keys()) - listed
        wrong |= listed - before.keys() - after.keys()
        if wrong or listed & self.java.deleted:
            raise SurpriseError(
                f"Java lists other ledgers: {sorted(wrong | listed & self.java.deleted)}"
            )
        if verdict is not Verdict.WHOLE:
            raise SurpriseError(f"not all copies are good: {bad}")
        self.say(f"{len(listed & self.java.created)} ledgers are whole")
        self.say("stopping all processes")

    async def _bookmender(self, *arguments: str, store: str = "") -> list[str]:
        """Run a command visibly, and return the lines that it prints. ``store``: of receipts."""
        self.say(f"$ {'FEED_STORE=… ' if store else ''}bookmender {' '.join(arguments)}")
        found = await bookmender(
            self.cluster.metadata_service_uri,
            *arguments,
            variables={"FEED_STORE": store} if store else {},
        )
        if found.exit_code:
            raise SurpriseError(f"the command ended with {found.exit_code}: {found.out}{found.err}")
        return found.out.splitlines()


def applied(checkpoints: list[Checkpoint]) -> Catalogue:
    """Return what all checkpoints together tell."""
    found: dict[int, Known] = {}
    for checkpoint in checkpoints:
        for span in checkpoint.spans:
            ledger_id = ledger_id_of(span.key)
            assert ledger_id is not None, span
            if span.fingerprint is None:
                found.pop(ledger_id, None)
            else:
                found[ledger_id] = Known(version=span.end, fingerprint=f"{span.fingerprint:016x}")
    return found


if __name__ == "__main__":
    main()
