"""Checks what bookmender needs from its host, ZooKeeper and the bookies.

``status`` says how the cluster's data is; ``doctor`` says whether bookmender could do its work. The
checks run at the same time, and each one is bounded. A check gathers values; a function without
I/O judges them.

By default nothing is written. Write access is proven by a transaction that ZooKeeper must refuse
for another reason: its last operation checks a znode that does not exist.
"""

import asyncio
import enum
import os
import shutil
import statistics
import uuid
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from msgspec import structs

from daemon.admin_session import AdminSession
from daemon.answers import Answer
from daemon.conflicts import conflicts, exposed_secrets
from daemon.http.access import read_token
from daemon.operations.bookies import ask_each, known_bookies, registered_bookies
from daemon.placement import check_rack_sources, rack_source, resolve_host
from daemon.settings import Settings
from daemon.state import JOURNAL_FOLDER, state_dir
from daemon.status.conditions import conditions
from daemon.status.gathering import gather_services
from daemon.status.state import BookieStates, Services, Status
from daemon.words import counted, printable, shortened
from daemon.zookeeper import open_store
from ledgers.bookies import Bookies
from ledgers.clock import Clock, SystemClock
from ledgers.errors import (
    BookmenderError,
    NoNodeError,
    SecureConnectionError,
    SettingsError,
    UnauthorizedError,
    UnsupportedError,
)
from ledgers.model import BookieId
from ledgers.placement.pulsar import PULSAR_RACKS_PATH
from ledgers.placement.topology import Racks
from ledgers.registration import BookieView, read_instance_id
from ledgers.security import SecuritySettings
from ledgers.store import Check, Create, MetadataStore, MultiFailed, SetData, children_if_any
from ledgers.zookeeper.servers import Server, ask_servers
from replication.cluster import ViewSource
from replication.nodes import LiveNode, NodeInfo, Role
from replication.racks import RackKeeper, has_unused_racks
from replication.znodes import ClusterPaths

CONNECT_TIMEOUT_S, CHECK_TIMEOUT_S = 3.0, 4.0
"""Time to open a session, and for each check in it. With the time to ask each server of ZooKeeper,
less than 10 s in all."""
PINGS = 11
LATENCY_BOUNDS_S = 0.1, 1.0
SKEW_BOUNDS_S = 2.0, 30.0
"""From which value on it is a warning, and an error."""
BOOKIE_SLOW_S = 1.0
FREE_BYTES_MIN = 1 << 30
"""Twice the size that the journal may reach."""
OLDEST_ZOOKEEPER = (3, 6)
SHOWN_MAX = 20


class Level(enum.StrEnum):
    """In ascending order."""

    OK = "OK"
    WARN = "WARN"
    ERROR = "ERROR"


class Finding(Answer, frozen=True, kw_only=True):
    """The result of a check."""

    check: str
    level: Level = Level.OK
    text: str
    advice: str | None = None
    """The next step; null if nothing is wrong."""

    def to_text(self) -> str:
        line = f"{self.level:<6} {self.check:<11} {self.text}"
        return printable(line) + (f"\n{'':<19}{printable(self.advice)}" if self.advice else "")


class Diagnosis(Answer, frozen=True, kw_only=True):
    level: Level
    """The worst of all findings."""
    findings: list[Finding]


def _ok(check: str, text: str) -> Finding:
    return Finding(check=check, text=text)


def _warn(check: str, text: str, advice: str) -> Finding:
    return Finding(check=check, level=Level.WARN, text=text, advice=advice)


def _error(check: str, text: str, advice: str | None = None) -> Finding:
    return Finding(check=check, level=Level.ERROR, text=text, advice=advice)


def _bounded_by(bounds: tuple[float, float], value: float, found: Finding) -> Finding:
    """Return the finding as a warning or an error if the value reaches the first or the second
    bound; else without its advice."""
    if value < bounds[0]:
        return _ok(found.check, found.text)
    return structs.replace(found, level=Level.ERROR if value >= bounds[1] else Level.WARN)


def worst(found: Iterable[Finding]) -> Level:
    return max((each.level for each in found), key=list(Level).index)


async def diagnose(
    settings: Settings, config: Path | None = None, *, writes: bool, clock: Clock
) -> list[Finding]:
    """Run all checks, and return their findings in a fixed order. ``config``: the settings file."""
    on_host = [*settings_findings(settings, config), *state_findings(state_dir(settings))]
    try:
        servers = await ask_servers(settings.uri.hosts, security=settings.security)
    except SettingsError as error:
        return [*on_host, _error("zookeeper", str(error), WRONG_SECURITY)]
    return [
        *on_host,
        *server_findings(servers),
        *await _in_cluster(settings, servers, writes=writes, clock=clock),
    ]


async def _in_cluster(
    settings: Settings, servers: Mapping[str, Server], *, writes: bool, clock: Clock
) -> list[Finding]:
    """Open a session at the servers that answer, and run the checks that need it.

    The other servers are left out, because kazoo looks up all names before it connects, and a dead
    resolver would block it for longer than the time of this command.
    """
    reachable = [host for host, server in servers.items() if not server.error]
    if not reachable:
        text, advice = "no server answers, so nothing else can be checked", NO_SERVER
        return [_error("zookeeper", text, advice)]
    timeout_s = min(settings.zookeeper.connect_timeout_s, CONNECT_TIMEOUT_S)
    hasty = replace(
        settings,
        metadata_service_uri=str(replace(settings.uri, hosts=",".join(reachable))),
        zookeeper=replace(settings.zookeeper, connect_timeout_s=timeout_s),
    )
    try:
        async with open_store(hasty) as store:
            return await _in_session(settings, store, writes=writes, clock=clock)
    except BookmenderError as error:
        advice = NO_SERVER
        if isinstance(error, SettingsError | SecureConnectionError):
            advice = WRONG_SECURITY
        elif isinstance(error, UnsupportedError):
            advice = OLD_SERVER
        return [_error("zookeeper", str(error), advice)]


async def _in_session(
    settings: Settings, store: MetadataStore, *, writes: bool, clock: Clock
) -> list[Finding]:
    try:
        async with asyncio.timeout(CHECK_TIMEOUT_S):
            cluster = await AdminSession.on(store, settings)
        ask = partial(ask_bookies, security=settings.security)
        return await diagnose_cluster(cluster, writes=writes, clock=clock, ask=ask)
    except (BookmenderError, TimeoutError) as error:
        advice = "Check metadata_service_uri. If the cluster is new, create it with BookKeeper."
        text = str(error) or "no answer"
        return [_error("cluster", text, advice)]


NO_SERVER = "Check metadata_service_uri, the network, and that the servers have a quorum."
OLD_SERVER = "Upgrade it to ZooKeeper 3.6 or later."
WRONG_SECURITY = "Correct the section [security] of the settings, or the file that it names."

AskBookies = Callable[[BookieView], Awaitable[Mapping[BookieId, float | BookmenderError]]]
"""Asks each registered bookie for something cheap. Returns the reply time in s, or the error."""


async def diagnose_cluster(
    cluster: AdminSession, *, writes: bool, clock: Clock, ask: AskBookies
) -> list[Finding]:
    """Run the checks that need a session, at the same time."""
    checks: dict[str, Awaitable[list[Finding]]] = {
        "latency": _latency(cluster, clock),
        "cluster": _cluster_id(cluster),
        "read access": _read_access(cluster),
        "write access": _write_access(cluster),
        "clock": _clock(cluster, writes=writes, clock=clock),
        "bookies": _bookies(cluster, ask),
        "racks": _racks(cluster, clock),
        "nodes": _services(cluster),
    }
    parts = await asyncio.gather(*(_bounded(name, check) for name, check in checks.items()))
    return [finding for part in parts for finding in part]


async def _bounded(name: str, check: Awaitable[list[Finding]]) -> list[Finding]:
    """Return the findings of the check; an error if it fails or takes too long."""
    try:
        async with asyncio.timeout(CHECK_TIMEOUT_S):
            return await check
    except TimeoutError:
        text, advice = f"no answer within {CHECK_TIMEOUT_S:g} s", "Check the load of ZooKeeper."
    except UnauthorizedError as error:
        text, advice = str(error), "Grant the user of bookmender access with setAcl."
    except BookmenderError as error:
        text, advice = str(error), "Run the command again; if the error stays, check ZooKeeper."
    return [_error(name, text, advice)]


# --- This host ------------------------------------------------------------------------------------


def settings_findings(settings: Settings, config: Path | None = None) -> list[Finding]:
    """Judge the settings, and who may read or change the files with secrets."""
    found = [
        _warn("settings", f"{', '.join(each.keys)}: {each.text}", each.advice)
        for each in (*conflicts(settings), *exposed_secrets(settings, config))
    ]
    try:
        check_rack_sources(settings.placement)
    except SettingsError as error:
        found.append(_error("settings", str(error)))
    try:
        if settings.http.token_file:
            read_token(settings.http.token_file)
    except SettingsError as error:
        found.append(_error("settings", str(error)))
    return found or [_ok("settings", "no settings fight each other")]


def state_findings(folder: Path) -> list[Finding]:
    """Check that the journal can be written to this folder. Nothing is written."""
    journal = folder / JOURNAL_FOLDER  # may belong to another user than its parent
    nearest = next(each for each in (journal, *journal.parents) if os.access(each, os.F_OK))
    if not (nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)):
        text = f"{nearest} cannot be written by this user, so no metadata can be changed"
        advice = "Run doctor as the user of the service, or set node.state_dir."
        return [_error("state", text, advice)]
    free_bytes = shutil.disk_usage(nearest).free
    free = f"{free_bytes / 2**30:,.1f} GiB free"
    if free_bytes < FREE_BYTES_MIN:
        text = f"the disk of {folder} has only {free}; the journal needs up to 0.5 GiB"
        return [_warn("state", text, "Free some space, or set node.state_dir.")]
    return [_ok("state", f"{folder} is writable, {free}")]


# --- ZooKeeper ------------------------------------------------------------------------------------


def server_findings(servers: Mapping[str, Server]) -> Iterator[Finding]:
    for host, server in servers.items():
        if server.error:
            advice = f"{server.advice[0].upper()}{server.advice[1:]}."
            yield (_warn if len(servers) > 1 else _error)("zookeeper", server.error, advice)
        elif server.version and _numbers(server.version) < OLDEST_ZOOKEEPER:
            text = f"{host} is ZooKeeper {server.version}, which is too old for bookmender"
            yield _error("zookeeper", text, OLD_SERVER)
        else:
            told = f"ZooKeeper {server.version}, {server.mode}" if server.version else "reachable"
            yield _ok("zookeeper", f"{host} is {told}")
    versions = {server.version for server in servers.values() if server.version}
    if len({_numbers(version) for version in versions}) > 1:
        text = f"the servers have different versions: {', '.join(sorted(versions))}"
        yield _warn("zookeeper", text, "Finish the upgrade.")


def _numbers(version: str) -> tuple[int, ...]:
    """Return major and minor version."""
    return tuple(int(part) for part in version.split(".")[:2] if part)


async def _latency(cluster: AdminSession, clock: Clock) -> list[Finding]:
    times_s = []
    for _ in range(PINGS):
        sent_s = clock.now_s()
        await cluster.store.exists(cluster.root)
        times_s.append(clock.now_s() - sent_s)
    return [latency_finding(statistics.median(times_s))]


def latency_finding(median_s: float) -> Finding:
    text = f"ZooKeeper answers in {median_s * 1000:,.1f} ms (median of {PINGS} reads)"
    advice = "Check the load and the disks of ZooKeeper, and the network."
    return _bounded_by(LATENCY_BOUNDS_S, median_s, _warn("latency", text, advice))


# --- The cluster's znodes -------------------------------------------------------------------------


async def _cluster_id(cluster: AdminSession) -> list[Finding]:
    instance_id = await read_instance_id(cluster.store, cluster.root)
    layout = cluster.manager.layout.name.lower()
    text = f"{cluster.root} is a BookKeeper cluster, layout {layout}"
    if instance_id is None:
        advice = "Without it, nodes cannot notice that another cluster has replaced this one."
        return [_warn("cluster", f"{text}, without INSTANCEID", advice)]
    return [_ok("cluster", f"{text}, instance {instance_id}")]


def _written_trees(paths: ClusterPaths) -> tuple[str, ...]:
    """Return the znodes below which bookmender creates others."""
    return (paths.directory, paths.marks, paths.locks, paths.election, paths.nodes, paths.orders)


async def _read_access(cluster: AdminSession) -> list[Finding]:
    denied, of_bookies = [], ("", "/available", "/available/readonly", "/cookies")
    for path in (*(cluster.root + name for name in of_bookies), *_written_trees(cluster.paths)):
        try:
            await children_if_any(cluster.store, path)
        except UnauthorizedError as error:
            denied.append(access_finding("read access", path, error))
    return denied or [_ok("read access", "all trees can be listed")]


async def _write_access(cluster: AdminSession) -> list[Finding]:
    """Check that marks, locks, votes, orders and metadata could be written.

    ZooKeeper refuses each transaction as a whole: its last operation checks a znode that does not
    exist. If an ACL denies access, the first operation is refused already.
    """
    name = f"doctor-{uuid.uuid4()}"
    never = Check(path=f"{cluster.root}/{name}")
    attempts: dict[str, Create | SetData] = {}
    for wanted in _written_trees(cluster.paths):
        parent = wanted
        while await cluster.store.exists(parent) is None:  # the first node creates the rest
            parent = parent.rpartition("/")[0]
        attempts[parent] = Create(path=f"{parent}/{name}")
    attempts |= await _rewrite_of_a_ledger(cluster)
    found = []
    for path, attempt in attempts.items():
        try:
            await cluster.store.multi([attempt, never])
        except MultiFailed as error:
            if isinstance(error.cause, UnauthorizedError):
                found.append(access_finding("write access", path, error.cause))
    told = "marks, locks, votes, orders and metadata can be written"
    return found or [_ok("write access", told)]


async def _rewrite_of_a_ledger(cluster: AdminSession) -> dict[str, SetData]:
    """Return a write of unchanged metadata, of the first ledger that is found."""
    async for ledger_ids in cluster.manager.ledger_ids():
        for ledger_id in ledger_ids[:1]:
            path = cluster.manager.path(ledger_id)
            with suppress(NoNodeError):
                data, stat = await cluster.store.get(path)
                return {path: SetData(path=path, data=data, version=stat.version)}
    return {}


def access_finding(check: str, path: str, error: UnauthorizedError) -> Finding:
    advice = "Grant the user of bookmender all permissions on this tree with setAcl."
    return _error(check, f"{path}: {error}", advice)


async def _clock(cluster: AdminSession, *, writes: bool, clock: Clock) -> list[Finding]:
    if not writes:
        return [_ok("clock", "not compared with ZooKeeper's; --write compares them")]
    parent = cluster.paths.directory
    if await cluster.store.exists(parent) is None:  # no auto-recovery has run yet
        parent = cluster.root
    path = f"{parent}/doctor-{uuid.uuid4()}"
    sent_ms = clock.wall_ms()
    await cluster.store.create(path, is_ephemeral=True)
    replied_ms = clock.wall_ms()
    stat = await cluster.store.exists(path)
    await cluster.store.delete(path)
    assert stat is not None
    return [clock_finding((sent_ms + replied_ms) / 2000 - stat.ctime_ms / 1000)]


def clock_finding(ahead_s: float) -> Finding:
    """``ahead_s``: how far this host's clock is ahead of ZooKeeper's; negative: behind."""
    where = "ahead of" if ahead_s >= 0 else "behind"
    text = f"this host's clock is {abs(ahead_s):,.1f} s {where} ZooKeeper's"
    advice = "Synchronise both clocks (NTP). bookmender uses ZooKeeper's time, Java does not."
    return _bounded_by(SKEW_BOUNDS_S, abs(ahead_s), _warn("clock", text, advice))


# --- Bookies --------------------------------------------------------------------------------------


async def ask_bookies(
    view: BookieView, *, security: SecuritySettings
) -> Mapping[BookieId, float | BookmenderError]:
    """Ask each registered bookie for its disk space, which needs no ledger. Return the reply time
    in s, or the error."""
    clock = SystemClock()

    async def reply_time_s(client: Bookies, bookie: BookieId) -> float:
        sent_s = clock.now_s()
        with suppress(UnsupportedError):  # an answer, too
            await client.room(bookie)
        return clock.now_s() - sent_s

    return await ask_each(view, reply_time_s, security)


async def _bookies(cluster: AdminSession, ask: AskBookies) -> list[Finding]:
    view = await cluster.registration.read()
    return bookie_findings(view, await ask(view), known=await known_bookies(cluster))


def bookie_findings(
    view: BookieView,
    answers: Mapping[BookieId, float | BookmenderError],
    *,
    known: Collection[BookieId] = (),
) -> list[Finding]:
    """``known``: also those that are absent."""
    found, absent = [], sorted({*known} - view.available.keys())
    errors = {b: each for b, each in sorted(answers.items()) if isinstance(each, BookmenderError)}
    for bookie, error in list(errors.items())[:SHOWN_MAX]:
        text = f"{bookie} is registered, but does not serve this host: {error}"
        advice = "Check its process, the network and firewalls, and its authentication."
        found.append(_error("bookies", text, advice))
    if len(errors) > SHOWN_MAX:
        text = f"{len(errors) - SHOWN_MAX:,} more bookies do not serve this host"
        found.append(_error("bookies", text))
    times = {b: each for b, each in answers.items() if not isinstance(each, BookmenderError)}
    slow = [bookie for bookie, reply_s in times.items() if reply_s > BOOKIE_SLOW_S]
    if slow:
        text = f"slow to answer: {_listed(slow)}"
        found.append(_warn("bookies", text, "Check the load of these bookies."))
    if view.superseded:
        text = f"another bookie is registered at the address of {_listed(view.superseded)}"
        found.append(_warn("bookies", text, "Give each bookie an address of its own."))
    if times:
        slowest_ms = max(times.values()) * 1000
        count = counted(len(view.available) + len(absent), "bookie")
        writable = f"{len(view.writable):,} of {count} writable"
        writable += f" (not registered: {_listed(absent)})" if absent else ""
        text = f"{writable}; {len(times):,} answer, the slowest in {slowest_ms:,.0f} ms"
        found.append(_ok("bookies", text))
    return found


def _listed(bookies: Iterable[BookieId]) -> str:
    return shortened(sorted(bookies), at_most=SHOWN_MAX)


async def _racks(cluster: AdminSession, clock: Clock) -> list[Finding]:
    store, racks = cluster.store, Racks()
    source = rack_source(cluster.settings.placement, store, clock)
    if source is None:
        return [no_racks_finding(is_unused=await has_unused_racks(store))]
    views = ViewSource(cluster.registration, clock)
    view = await views.refresh()
    keeper = RackKeeper(source, racks, views, clock=clock, resolve_host=resolve_host)
    if not await keeper.refresh():
        text = f"the source of racks cannot be read: {source.name}"
        advice = "Nodes keep the racks that they know. Repair the source."
        return [_error("racks", text, advice)]
    return [racks_finding(source.name, racks.known, view.available)]


def no_racks_finding(*, is_unused: bool) -> Finding:
    """``is_unused``: Pulsar stores racks in this ZooKeeper."""
    if is_unused:
        return _warn(
            "racks",
            f"Pulsar stores racks in {PULSAR_RACKS_PATH}, and no source of racks is set",
            f'Set placement.racks_znode = "{PULSAR_RACKS_PATH}".',
        )
    return _ok("racks", "no source of racks is set: all bookies are in one rack")


def racks_finding(
    source: str, known: Mapping[BookieId, str], registered: Collection[BookieId]
) -> Finding:
    """Judge the racks of the registered bookies. ``known``: those that the source knows."""
    if unknown := [bookie for bookie in registered if bookie not in known]:
        return _warn(
            "racks",
            f"{source} has no rack for {_listed(unknown)}",
            "Add these bookies. Until then they are in the default rack.",
        )
    count = len({known[bookie] for bookie in registered})
    return _ok("racks", f"{source} has a rack for each bookie: {count} racks")


# --- Nodes ----------------------------------------------------------------------------------------

OF_SERVICES = ("NO_BOOKIES", "NO_WRITABLE_BOOKIES", "NO_AUDITOR")
"""Conditions of status that need no reading of the queue."""


async def _services(cluster: AdminSession) -> list[Finding]:
    """Judge what ``status`` judges, with its conditions, and find nodes that run twice."""
    store, paths = cluster.store, cluster.paths
    services, nodes = await gather_services(store, paths)
    view = await registered_bookies(cluster)
    status = Status(
        services=services,
        bookies=BookieStates(writable=tuple(view.writable), read_only=tuple(view.read_only)),
    )
    found = [
        Finding(
            check="cluster",
            level=Level.ERROR if each.severity == "ERROR" else Level.WARN,
            text=f"{each.code}: {each.fact}",
            advice=each.action,
        )
        for each in conditions(status)
        if each.code in OF_SERVICES
    ]
    if services.leader is not None:
        found.append(leader_finding(services, java_count=await _java_votes(cluster, nodes)))
    return [*found, *node_findings(services.nodes)]


async def _java_votes(cluster: AdminSession, nodes: Sequence[LiveNode]) -> int:
    """Return how many candidates of the election are not bookmender nodes."""
    store, election = cluster.store, cluster.paths.election
    ours = {node.session_id for node in nodes}
    votes = await children_if_any(store, election)
    stats = [await store.exists(f"{election}/{vote}") for vote in votes]
    return sum(stat is not None and stat.ephemeral_owner not in ours for stat in stats)


def leader_finding(services: Services, *, java_count: int) -> Finding:
    if services.is_java_leader:
        return _warn(
            "auditor",
            f"Java's AutoRecovery leads ({services.leader})",
            "It ignores safety holds, maintenance windows and drains. Stop Java's auditors to use "
            "these.",
        )
    beside = f"; {counted(java_count, 'candidate')} of Java's AutoRecovery" if java_count else ""
    return _ok("auditor", f"{services.leader} leads{beside}")


def node_findings(nodes: Sequence[NodeInfo]) -> list[Finding]:
    """Find nodes that run twice. Repairs by hand and fsck do not count."""
    services = [node for node in nodes if node.role in (Role.AUDITOR, Role.WORKER)]
    found = []
    pids_of: dict[tuple[str, str], list[int]] = {}
    hosts_of: dict[str, set[str]] = {}
    for info in services:
        pids_of.setdefault((info.role.value, info.host), []).append(info.pid)
        if info.bookie_id and info.role is Role.WORKER:
            hosts_of.setdefault(info.bookie_id, set()).add(info.host)
    for (role, host), pids in sorted(pids_of.items()):
        if len(pids) > 1:
            shown = ", ".join(map(str, sorted(pids)))
            text = f"{host} runs {len(pids)} nodes with the role {role} (pid {shown})"
            advice = "Stop all but one. A node that was killed disappears with its session."
            found.append(_warn("nodes", text, advice))
    for bookie, hosts in sorted(hosts_of.items()):
        if len(hosts) > 1:
            text = f"{bookie} is the local bookie of several hosts: {', '.join(sorted(hosts))}"
            found.append(_warn("nodes", text, "Correct node.bookie_id."))
    workers = sum(info.role is Role.WORKER for info in services)
    if not workers:
        text = "no bookmender worker is running"
        found.append(_warn("nodes", text, "Start one: bookmender daemon"))
    text = f"{counted(workers, 'worker')} and {counted(len(services) - workers, 'auditor')} run"
    return found or [_ok("nodes", text)]
