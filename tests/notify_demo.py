"""Kill servers, nodes and bookies at random, and every client learns the latest version of every
object that it registered for: ``make notify-demo``.

Three nodes and two servers of notifications run. Clients of the library, Java programs and readers
of server-sent events (curl) register for ledgers, bookies and published objects. For a minute
ledgers are written, repaired and deleted, objects are published, and something is killed every few
seconds. Then all starts again, and after a while each client's version of each object must be that
of ZooKeeper.

Exit code 0: all that is so; 1: it is not; 2: a program is missing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from daemon.local.cluster import LocalCluster
from daemon.local.jars import BOOKKEEPER_DEFAULT
from daemon.local.java import Java
from daemon.local.ports import free_ports
from daemon.local.processes import Child
from daemon.logs import set_up_logs
from daemon.settings import LogSettings
from ledgers.errors import BookmenderError, NoNodeError
from ledgers.tasks import task_scope
from notifications.client import Change, Fresh, Notifications, Stale, ask, bookie, ledger, published
from notifications.objects import object_path
from notifications.protocol import Key, Version
from tests.cluster.commands import bookmender
from tests.cluster.steps import Bench, bench, nodes, shape, wait_for
from tests.demo import Say, SurpriseError, logs_kept, run_demo, teller
from tests.java.build import compiled_classes
from tests.java.jvm import java_command

BOOKIES, NODES, SERVERS = 5, 3, 2
CLIENTS, CURLS, JAVA_PROGRAMS = 187, 10, 3
OBJECTS_A_CLIENT = 10
TROUBLE_S, SETTLE_S = 60.0, 90.0
OBJECTS = [f"object-{number}" for number in range(10)]
SECRET = "a token for this demonstration"


def main() -> None:
    parser = argparse.ArgumentParser(prog="make notify-demo ARGS=")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("build/notify-demo"),
        help="folder for the logs after a failure",
    )
    parser.add_argument("--seconds", type=float, default=TROUBLE_S, help="of trouble")
    options = parser.parse_args()
    run_demo("notify-demo", partial(notify_and_compare, options.output.resolve(), options.seconds))


def notify_and_compare(output: Path, trouble_s: float = TROUBLE_S) -> None:
    """Run the demonstration. ``output``: for the logs after a failure. Raises SurpriseError."""
    set_up_logs(LogSettings(level="error"))
    compiled_classes(BOOKKEEPER_DEFAULT, Java.find())  # an error without compiler comes at once
    seed, say = time.time_ns() % 1_000_000, teller()
    with TemporaryDirectory(prefix="notify-demo-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with logs_kept(folder, output):
            say(f"starting ZooKeeper and {BOOKIES} bookies (seed {seed})")
            with LocalCluster.start(
                folder / "cluster", bookies=BOOKIES, session_timeout_s=4.0
            ) as cluster:
                demo = Demo(cluster, folder, random.Random(seed), say)
                asyncio.run(demo.run(trouble_s))
    say("done: every client knows the latest version of each of its objects")


@dataclass
class Holder:
    """A program that holds objects: ``has`` is the version of each that it knows; 0: the object
    does not exist."""

    keys: Sequence[Key]
    has: dict[Key, Version] = field(default_factory=dict)
    told_count: int = 0
    stale_count: int = 0


class Demo:
    """``servers``, ``started``: the processes that run, by name."""

    def __init__(
        self, cluster: LocalCluster, folder: Path, chance: random.Random, say: Say
    ) -> None:
        self.cluster, self.folder, self.chance, self.say = cluster, folder, chance, say
        self.uri = cluster.metadata_service_uri
        self.ports = free_ports(SERVERS)
        self.urls = [f"http://127.0.0.1:{port}" for port in self.ports]
        self.started: dict[str, Child] = {}
        self.ledger_ids: list[int] = []
        self.holders: list[Holder] = []
        self.on: Bench
        self.start: Callable[..., Child]

    async def run(self, trouble_s: float) -> None:
        async with bench(self.uri) as self.on, nodes(self.uri, self.folder) as self.start:
            (self.folder / "token").write_text(SECRET)
            said = await bookmender(self.uri, "feed", "enable")
            assert said.exit_code == 0, said
            for number in range(NODES):
                self.start_node(number)
            for number in range(SERVERS):
                self.start_server(number)
            await self.write(20)
            await wait_for(self.are_served, "servers of notifications")
            async with task_scope() as scope:
                programs = [self.follow] * CLIENTS + [self.follow_events] * CURLS
                for follow in programs + [self.follow_in_java] * JAVA_PROGRAMS:
                    scope.start(follow())
                self.say(
                    f"{CLIENTS} clients, {CURLS} readers of events, {JAVA_PROGRAMS} Java programs "
                    "registered; trouble begins"
                )
                await self.make_trouble(trouble_s)
                await self.repair_all()
                await self.compare()

    def start_node(self, number: int) -> None:
        self.started[f"node{number}"] = self.start(f"node{number}")

    def start_server(self, number: int) -> None:
        self.started[f"server{number}"] = self.start(
            f"server{number}",
            command=("daemon", "notify", "serve"),
            settings={
                "NOTIFY_PORT": str(self.ports[number]),
                "NOTIFY_URL": self.urls[number],
                "HTTP_TOKEN_FILE": str(self.folder / "token"),
            },
        )

    async def are_served(self) -> bool:
        for url in self.urls:
            try:
                await ask("GET", f"{url}/v1/objects/L{self.ledger_ids[0]}")
            except BookmenderError:
                return False
        return True

    # --- Those who hold objects -------------------------------------------------------------------

    def hold(self) -> Holder:
        ids = self.chance.sample(self.ledger_ids, OBJECTS_A_CLIENT - 2)
        keys = [ledger(each) for each in ids]
        keys.append(bookie(self.chance.choice(self.cluster.bookies)))
        keys.append(published(self.chance.choice(OBJECTS)))
        holder = Holder(keys)
        self.holders.append(holder)
        return holder

    async def follow(self) -> None:
        """Use the library, as an application does."""
        holder = self.hold()
        async with Notifications.open(*self.urls) as notifications:
            for key in holder.keys:
                notifications.register(key)
            async for item in notifications:
                match item:
                    case Change():
                        await self.take(holder, item)
                    case Stale():
                        holder.stale_count += 1
                    case Fresh():
                        pass

    async def follow_events(self) -> None:
        """Run curl, again and again, with the id of the last event."""
        holder, last_id = self.hold(), ""
        query = "&".join(f"key={key}" for key in holder.keys)
        while True:
            url = f"{self.chance.choice(self.urls)}/v1/events?{query}"
            command = ["curl", "-sN", "--max-time", "40", "-H", f"Last-Event-ID: {last_id}", url]
            curl = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
            try:
                assert curl.stdout is not None
                async for line in curl.stdout:
                    name, _, value = line.decode().rstrip().partition(": ")
                    if name == "data" and (changes := json.loads(value).get("changes")):
                        for key, version, is_deleted in changes:
                            await self.take(holder, Change(key, version, is_deleted))
                    if name == "id":
                        last_id = value
            finally:
                with suppress(ProcessLookupError):
                    curl.kill()
                await curl.wait()
            await asyncio.sleep(self.chance.uniform(0, 1))

    async def follow_in_java(self) -> None:
        """Run a Java program that holds ledgers."""
        holder = self.hold()
        holder.keys = [key for key in holder.keys if key.startswith("L")]
        main = ("bookmender.NotificationsDriver", *self.urls)
        command = java_command(BOOKKEEPER_DEFAULT, Java.find(), temporary=self.folder, program=main)
        java = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        try:
            assert java.stdin is not None
            assert java.stdout is not None
            for key in holder.keys:
                java.stdin.write(f"register {key[1:]} 0\n".encode())
            async for line in java.stdout:
                told = json.loads(line)
                version = None if told["version"] < 0 else told["version"]
                await self.take(holder, Change(f"L{told['ledger']}", version, told["deleted"]))
        finally:
            with suppress(ProcessLookupError):
                java.kill()
            await java.wait()

    async def take(self, holder: Holder, change: Change) -> None:
        """Read an object if its version is unknown, as an application does after each change."""
        holder.told_count += 1
        version = 0 if change.is_deleted else change.version
        holder.has[change.key] = await self.latest(change.key) if version is None else version

    # --- Trouble ----------------------------------------------------------------------------------

    async def make_trouble(self, trouble_s: float) -> None:
        until_s = time.monotonic() + trouble_s
        actions: list[Callable[[], Awaitable[None]]] = [
            self.kill_server,
            self.kill_node,
            self.kill_bookie,
            partial(self.write, 3),
            self.delete,
            self.publish,
            self.publish,
        ]
        while time.monotonic() < until_s:
            await self.chance.choice(actions)()
            await asyncio.sleep(self.chance.uniform(0.2, 2))

    async def kill_server(self) -> None:
        await self._restart(f"server{self.chance.randrange(SERVERS)}", self.start_server)

    async def kill_node(self) -> None:
        await self._restart(f"node{self.chance.randrange(NODES)}", self.start_node)

    async def _restart(self, name: str, start: Callable[[int], None]) -> None:
        self.say(f"  kill -9 {name}")
        self.started[name].kill()
        await asyncio.sleep(self.chance.uniform(0, 3))
        start(int(name[-1]))

    async def kill_bookie(self) -> None:
        """Kill a bookie if all others are there, and start it again later: its ledgers move."""
        victim = self.chance.choice(self.cluster.bookies)
        self.say(f"  kill -9 bookie {victim}")
        await asyncio.to_thread(self.cluster.kill, victim)
        await asyncio.sleep(self.chance.uniform(3, 8))
        await asyncio.to_thread(self.cluster.start_bookies, [victim])

    async def write(self, count: int) -> None:
        numbers = range(len(self.ledger_ids), len(self.ledger_ids) + count)
        written = await self.on.write(*(shape(number) for number in numbers))
        self.ledger_ids += [each.ledger_id for each in written]

    async def delete(self) -> None:
        ledger_id = self.chance.choice(self.ledger_ids)
        manager = self.on.seen.manager
        if (found := await manager.find(ledger_id)) is not None:
            await self.on.seen.store.delete(manager.path(ledger_id), version=found.stat.version)

    async def publish(self) -> None:
        name = self.chance.choice(OBJECTS)
        with suppress(BookmenderError):  # this server may be dead
            url = self.chance.choice(self.urls)
            await ask("POST", f"{url}/v1/objects/{name}", token=SECRET)

    # --- The end ----------------------------------------------------------------------------------

    async def repair_all(self) -> None:
        self.say("trouble ends; waiting until everything is repaired")
        await self.on.wait_idle()

    async def compare(self) -> None:
        """Wait until each client has the latest version of each object."""
        behind: list[str] = []

        async def is_known() -> bool:
            now = {key: await self.latest(key) for key in {k for h in self.holders for k in h.keys}}
            behind[:] = [
                f"{key}: {holder.has.get(key, 0)} instead of {now[key]}"
                for holder in self.holders
                for key in holder.keys
                if holder.has.get(key, 0) != now[key]
            ]
            return not behind

        began_s = time.monotonic()
        try:
            await wait_for(is_known, "client with the latest versions", within_s=SETTLE_S)
        except AssertionError as error:
            raise SurpriseError(f"{len(behind)} are out of date, such as {behind[:5]}") from error
        told = sum(holder.told_count for holder in self.holders)
        stale = sum(holder.stale_count for holder in self.holders)
        self.say(
            f"all {len(self.holders)} know everything {time.monotonic() - began_s:.1f} s later: "
            f"they were told {told} changes, and {stale} times that they may be out of date"
        )

    async def latest(self, key: Key) -> Version:
        """Return the version that ZooKeeper has; 0: the object does not exist."""
        store, paths = self.on.seen.store, self.on.seen.paths
        match key[0], key[1:]:
            case "L", name:
                path = self.on.seen.manager.path(int(name))
            case "B", name:
                path = f"{self.on.seen.root}/available/{name}"
            case _, name:
                path = object_path(paths, name)
        try:
            _, stat = await store.get(path)
        except NoNodeError:
            return 0
        return stat.mzxid


if __name__ == "__main__":
    main()
