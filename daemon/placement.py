"""Builds the placement policy and its source of racks from the settings.

Racks come from a file, from a script like those of BookKeeper and Hadoop, or from a znode. The file
is read and the script run in a separate thread, because a disk may hang and a script may be slow.
"""

import asyncio
import os
import random
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog

from daemon.session import Session
from ledgers.clock import Clock
from ledgers.errors import (
    CorruptionError,
    LocalLimitError,
    NameNotResolvedError,
    SettingsError,
    UnavailableError,
)
from ledgers.host_names import host_names
from ledgers.model import BookieId
from ledgers.placement import (
    NoRule,
    PlacementPolicy,
    RackRule,
    RegionRule,
    Rule,
    Weighting,
    ZoneRule,
)
from ledgers.placement.pulsar import PULSAR_RACKS_PATH
from ledgers.placement.topology import Racks, clean_rack
from ledgers.store import MetadataStore
from ledgers.tasks import in_daemon_thread
from replication.cluster import IsolationGroups, ViewSource
from replication.racks import (
    RackKeeper,
    RackSource,
    ResolveHost,
    ZnodeRacks,
    has_unused_racks,
    remembered_racks,
)
from replication.settings import PlacementSettings
from replication.znodes import ClusterPaths

LOOK_INTERVAL_S = 10.0
"""Interval between two looks at the file."""
ASK_INTERVAL_S = 600.0
"""Interval after which a script is asked again about known hosts."""
ASK_TIMEOUT_S = 10.0
"""Timeout of one run of a script."""
HOSTS_MAX = 100
"""Number of hosts passed to one run of a script (Java: ``networkTopologyScriptNumberArgs``)."""
OUTPUT_BYTES_MAX = 1 << 20
"""Bytes that a run of a script may print: 10 KB for each host."""


def check_rack_sources(settings: PlacementSettings) -> None:
    """Raise SettingsError at start if the configured file or script does not exist."""
    if settings.racks_file:
        try:
            with Path(settings.racks_file).open("rb"):
                pass
        except OSError as error:
            raise SettingsError(
                f"placement.racks_file is {settings.racks_file!r}, which cannot be read "
                f"({error.strerror}). Create the file, or empty the setting",
                setting="placement.racks_file",
            ) from error
    if settings.racks_script:
        try:
            program = shlex.split(settings.racks_script)[:1]
        except ValueError:  # an unbalanced quotation mark
            program = []
        if not program or shutil.which(program[0]) is None:
            raise SettingsError(
                f"placement.racks_script is {settings.racks_script!r}, which cannot be run. Check "
                "that it exists and is executable, or empty the setting",
                setting="placement.racks_script",
            )


# --- A file ------------------------------------------------------------------------------------


def parse_rack_file(text: str) -> dict[str, str]:
    """Return racks by bookie. Each line holds a bookie and its rack, separated by ``=`` or blanks.

    ``#`` starts a comment. Raises CorruptionError that names the line.
    """
    racks: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].replace("=", " ").split()
        if not words:
            continue
        rack = clean_rack(words[1]) if len(words) == 2 else None
        if rack is None:
            raise CorruptionError(
                f"line {number} is not of the form 'bookie = /rack'; correct it",
                line=line.strip()[:200],
            )
        racks[words[0]] = rack
    return racks


class FileRacks:
    """Racks in a text file, which is read again after each change."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self._path, self._clock = path, clock

    @property
    def name(self) -> str:
        return f"file {self._path}"

    async def read(self, hosts: Collection[str]) -> Mapping[str, str]:
        try:
            return parse_rack_file(await in_daemon_thread(partial(self._path.read_text, "utf-8")))
        except OSError as error:
            raise UnavailableError(
                f"cannot be read: {error.strerror}. Create it, or empty placement.racks_file"
            ) from error
        except UnicodeDecodeError as error:
            raise CorruptionError("is not UTF-8 text") from error

    async def changes(self) -> AsyncGenerator[None, None]:
        seen = await in_daemon_thread(self._stamp)
        yield
        while True:
            await self._clock.sleep(LOOK_INTERVAL_S)
            try:
                stamp = await in_daemon_thread(self._stamp)
            except LocalLimitError:
                continue
            if stamp != seen:
                seen = stamp
                yield

    def _stamp(self) -> tuple[int, int, int] | None:
        """Return a value that changes with the file; None if the file does not exist."""
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_ino, stat.st_mtime_ns, stat.st_size


# --- A script ----------------------------------------------------------------------------------


class ScriptRacks:
    """Racks printed by a command that receives hosts as arguments, by IP address if they have one.

    The protocol is that of BookKeeper's ScriptBasedMapping, so the same script works. Answers are
    cached.
    """

    def __init__(self, command: str, clock: Clock, *, timeout_s: float = ASK_TIMEOUT_S) -> None:
        self._command = shlex.split(command)
        self._clock, self._timeout_s = clock, timeout_s
        self._known: dict[str, str] = {}

    @property
    def name(self) -> str:
        return f"script {shlex.join(self._command)}"

    async def read(self, hosts: Collection[str]) -> Mapping[str, str]:
        unknown = sorted(set(hosts) - self._known.keys())
        for start in range(0, len(unknown), HOSTS_MAX):
            self._known.update(await self._ask(unknown[start : start + HOSTS_MAX]))
        return dict(self._known)

    async def changes(self) -> AsyncGenerator[None, None]:
        yield
        while True:
            await self._clock.sleep(ASK_INTERVAL_S)
            self._known.clear()
            yield

    async def _ask(self, hosts: Sequence[str]) -> Mapping[str, str]:
        running: list[subprocess.Popen[bytes]] = []
        command = [*self._command, *hosts]
        try:
            output = await in_daemon_thread(
                partial(run_bounded, command, self._timeout_s, on_start=running.append)
            )
        except asyncio.CancelledError:  # kill the children as well: the caller waits for them
            for process in running:
                _kill(process)
            raise
        words = output.split()
        if len(words) != len(hosts):
            raise CorruptionError(
                "it must print one rack for each host that it is given; correct it",
                given=len(hosts),
                printed=len(words),
            )
        racks = map(clean_rack, words)
        return {host: rack for host, rack in zip(hosts, racks, strict=True) if rack is not None}


def run_bounded(
    command: Sequence[str],
    timeout_s: float,
    *,
    on_start: Callable[["subprocess.Popen[bytes]"], None] = lambda process: None,
) -> str:
    """Run the command and return its output. Blocks. Kills the command and its children at the
    timeout.

    The output goes to files, because a child that outlives the command would hold a pipe open.
    """
    try:
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
            )
            on_start(process)
            try:
                status = process.wait(timeout_s)
            except subprocess.TimeoutExpired as error:
                _kill(process)
                process.wait()
                raise UnavailableError(
                    "took too long, and was killed", timeout_s=timeout_s
                ) from error
            if status:
                err.seek(0)
                said = err.read(OUTPUT_BYTES_MAX).decode(errors="replace").strip()
                last = " ".join(said.splitlines()[-1:])[:200]
                raise UnavailableError("failed", status=status, said=last)
            out.seek(0)
            if len(output := out.read(OUTPUT_BYTES_MAX + 1)) > OUTPUT_BYTES_MAX:
                raise UnavailableError(f"must not print more than {OUTPUT_BYTES_MAX:,} bytes")
            return output.decode(errors="replace")
    except OSError as error:
        raise LocalLimitError.of(error) or UnavailableError(
            f"cannot be run: {error.strerror}. Check that it exists and is executable, "
            "or empty placement.racks_script"
        ) from error


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """Kill the process and its children."""
    if process.poll() is None:
        with suppress(ProcessLookupError):  # it has just ended
            os.killpg(process.pid, signal.SIGKILL)


# --- Names ---------------------------------------------------------------------------------------


async def resolve_host(host: str) -> str | None:
    """Return the host's IP address; None if it does not resolve in time. Raises LocalLimitError."""
    try:
        return (await host_names().addresses(host))[0]
    except NameNotResolvedError:
        return None


log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionPlacement:
    """The placement policy of one session. ``rack_keeper`` keeps the racks up to date; None if
    racks have no source."""

    policy: PlacementPolicy
    racks: Racks
    rack_keeper: RackKeeper | None
    groups: IsolationGroups

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.groups.run())
            if self.rack_keeper is not None:
                tasks.create_task(self.rack_keeper.run())


async def load_placement(
    settings: PlacementSettings,
    *,
    store: MetadataStore,
    paths: ClusterPaths,
    views: ViewSource,
    local: BookieId | None,
    clock: Clock,
    rng: random.Random,
    resolve: ResolveHost = resolve_host,
) -> SessionPlacement:
    """Build the policy and read the racks once, if their source answers in time.

    Racks of absent bookies come from ``rack_memory``. ``local``: the bookie that is preferred among
    equals.
    """
    source = rack_source(settings, store, clock)
    racks = Racks() if source is None else Racks(await remembered_racks(store, paths))
    rack_keeper = None
    if source is not None:
        rack_keeper = RackKeeper(source, racks, views, clock=clock, resolve_host=resolve)
        await rack_keeper.start()
    elif await has_unused_racks(store):
        log.warning(
            "racks.unused",
            path=PULSAR_RACKS_PATH,
            next_step=f'set placement.racks_znode = "{PULSAR_RACKS_PATH}", because Pulsar uses it',
        )
    policy = PlacementPolicy(
        rule_of(settings),
        rng,
        locate=racks.rack_if_known,
        local=local,
        weighting=weighting_of(settings),
    )
    groups = IsolationGroups(
        store,
        clock,
        path=settings.racks_znode or PULSAR_RACKS_PATH,
        may_leave=settings.may_leave_isolation,
    )
    await groups.refresh()
    return SessionPlacement(policy=policy, racks=racks, rack_keeper=rack_keeper, groups=groups)


async def session_placement(session: Session, settings: PlacementSettings) -> SessionPlacement:
    """Build the policy for a session."""
    return await load_placement(
        settings,
        store=session.store,
        paths=session.paths,
        views=session.views,
        local=session.local,
        clock=session.clock,
        rng=session.rng,
    )


def rule_of(settings: PlacementSettings) -> Rule:
    match settings.policy:
        case "rack":
            return RackRule(min_racks=settings.min_racks, is_enforced=settings.enforce_min_racks)
        case "region":
            regions = map(clean_rack, settings.regions.split(";"))
            return RegionRule(
                min_regions=settings.min_regions,
                regions=frozenset(region for region in regions if region is not None),
                is_enforced=settings.enforce_min_regions,
            )
        case "zone":
            return ZoneRule(
                min_zones=settings.min_zones,
                desired_zones=settings.desired_zones,
                is_enforced=settings.enforce_zones,
            )
        case _:
            return NoRule()


def weighting_of(settings: PlacementSettings) -> Weighting | None:
    if not settings.weighted_by_free_disk:
        return None
    return Weighting(multiple_max=settings.disk_weight_max)


def rack_source(
    settings: PlacementSettings, store: MetadataStore, clock: Clock
) -> RackSource | None:
    """Return the configured source of racks; None without one."""
    if settings.racks_file:
        return FileRacks(Path(settings.racks_file), clock)
    if settings.racks_script:
        return ScriptRacks(settings.racks_script, clock)
    if settings.racks_znode:
        return ZnodeRacks(store, settings.racks_znode)
    return None
