"""One run of fsck from a command: what it needs is looked for before Spark starts, what it leaves
is told after.

The cluster is asked for what executors cannot know of the settings: where bookies are, and by which
rule.
"""

import errno
import fcntl
import importlib
import json
import os
import random
import socket
import sys
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import structlog

from auditor.findings import Findings
from auditor.fsck.levels import FsckOptions
from auditor.fsck.publishing import Fault, Foreseen, Published, Publisher, Show, foresee
from auditor.fsck.results.cluster import Cluster, check_cluster, keep_cluster
from auditor.fsck.results.last import note_marked, write_last
from auditor.fsck.results.replacing import replace_file
from auditor.fsck.results.summary import Summary
from auditor.fsck.running import FsckJob, OnProgress
from auditor.marking import BothQueues
from daemon.fsck.environment import (
    EXECUTORS_PYTHON,
    LaunchEnvironment,
    PySpark,
    applied,
    check_import,
    launch_environment,
)
from daemon.fsck.forking import started_ahead
from daemon.fsck.interrupting import quiet_when_interrupted
from daemon.local.java import Java
from daemon.operating.progress import printable
from daemon.placing import begin_placing, rule_of
from daemon.settings import Settings
from daemon.visit import Visit, by_hand, visit
from ledgers.clock import SystemClock
from ledgers.errors import BookmenderError, CorruptionError, RejectedError, SettingsError
from ledgers.instance_id import read_instance_id
from ledgers.metadata import BookieId
from ledgers.operations.tasks import task_scope
from ledgers.placement import Rule
from replication.cluster.cluster_view import ViewSource
from replication.cluster.membership import Half, Membership
from replication.cluster.own_state import parse_record, text
from replication.queue import payloads
from replication.queue.batching import Batcher
from replication.queue.tree import prepare_tree

log = structlog.get_logger()

LOCK_FILE = ".lock"
RACKS_FILE = "racks.json"
SPARK_LOG = "spark.log"
"""What Spark itself says of a run, errors alone once it has started; written anew by each."""
NO_PYSPARK = "PySpark is not installed: pip install 'bookmender[fsck]'"
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}
START_TIMEOUT_S = 300.0
"""From the launch of Spark until it can be used; 4 s where nothing else runs, longer where a
cluster is busy."""
ALL_CORES = "local[*]"
_SUBMITTED = "PYSPARK_GATEWAY_PORT"
"""Set by spark-submit, whose session is there already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a run is asked for. ``options`` are complete but for what the cluster and the run's name
    decide.

    ``master``: None for spark-submit's, or else all cores of this machine. ``is_anew``: a run that
    was killed is given up. ``start_timeout_s``: how long Spark may take to start; a session of
    spark-submit's is there already.
    """

    options: FsckOptions
    output: Path
    master: str | None = None
    spark_settings: Mapping[str, str] = field(default_factory=dict)
    start_timeout_s: float = START_TIMEOUT_S
    time_budget_s: float = 0.0
    checked_within_s: float = 0.0
    is_anew: bool = False


# --- What must be there ---------------------------------------------------------------------------


def check_spark(
    wanted: Wanted, environment: Mapping[str, str] = os.environ
) -> LaunchEnvironment | None:
    """Return what Spark is to start with; None where spark-submit has started it.

    Raises SettingsError that says what to install, or which environment variable makes the start
    impossible.
    """
    if _is_submitted(wanted, environment):
        need_modules("pyspark", "pyarrow")
        return None
    check_import(environment)
    need_modules("pyspark", "pyarrow")
    Java.find(environment)
    return _launch_environment(wanted, environment)


def _is_submitted(wanted: Wanted, environment: Mapping[str, str]) -> bool:
    return wanted.master is None and _SUBMITTED in environment


def _launch_environment(wanted: Wanted, environment: Mapping[str, str]) -> LaunchEnvironment:
    from auditor.fsck.spark.session import imported_pyspark, is_here

    master = wanted.master or ALL_CORES
    home, version = imported_pyspark()
    return launch_environment(
        master,
        environment,
        is_here=is_here(master),
        pyspark=PySpark(home=home, version=version),
        spark_settings=wanted.spark_settings,
    )


def need_modules(*names: str) -> None:
    """Of those that the daemon runs without. Raises SettingsError that says what to install."""
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise SettingsError(NO_PYSPARK) from error


@contextmanager
def holding_output(folder: Path) -> Iterator[None]:
    """Make the folder, and keep every other run out of it. Raises SettingsError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK_FILE).open("a+")
    except OSError as error:
        raise SettingsError(f"--output {folder}: cannot be written to: {error.strerror}") from error
    with lock:  # the system takes the lock back from a process that dies
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            who = f" ({holder})" if (holder := printable(lock.read(200).strip())) else ""
            raise SettingsError(
                f"--output {folder}: another run of fsck{who} writes there now: wait for its end, or give "
                "this one a folder of its own"
            ) from error
        except OSError as error:
            raise SettingsError(f"--output {folder}: cannot be locked: {error.strerror}") from error
        try:
            lock.truncate(0)  # who the last one was
            os.write(lock.fileno(), f"process {os.getpid()} on {socket.gethostname()}\n".encode())
            yield
        except OSError as error:
            if error.errno in _FULL and not error.filename:  # a write does not say to where
                error.filename = str(folder)
            raise


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Which cluster it is, where bookies are or were, and the rule for copies: None where nobody
    tells where bookies are."""

    cluster: Cluster
    rule: Rule | None
    racks: Mapping[BookieId, str]


async def find_places(cluster: Visit) -> Places:
    clock = SystemClock()
    views = ViewSource(cluster.registration, clock)
    await views.refresh()
    placing = await begin_placing(
        cluster.settings.placement,
        store=cluster.store,
        ur=cluster.ur,
        views=views,
        local=None,
        clock=clock,
        rng=random.Random(),
    )
    rule = None if placing.keeper is None else rule_of(cluster.settings.placement)
    return Places(cluster=await which_cluster(cluster), rule=rule, racks=dict(placing.racks.known))


async def which_cluster(cluster: Visit) -> Cluster:
    settings = cluster.settings
    return Cluster(
        instance_id=await read_instance_id(cluster.store, settings.uri.root) or "",
        metadata_service_uri=settings.metadata_service_uri,
    )


# --- The run --------------------------------------------------------------------------------------


async def look_up_places(settings: Settings) -> Places:
    """Whether the cluster is there shows as well, before Spark starts. Raises UnavailableError,
    SettingsError."""
    async with visit(settings) as cluster:
        return await find_places(cluster)


def run(wanted: Wanted, places: Places, on_progress: OnProgress) -> Summary:
    """To its end, on Spark. The output is held by the caller; raises as ``run_fsck`` does."""
    from auditor.fsck.results.run_folder import RunFolder
    from auditor.fsck.spark.job import run_fsck

    keep_cluster(wanted.output, places.cluster)
    write_racks(wanted.output, places.racks)
    job = job_of(wanted, now_s=time.time())
    options = replace(
        wanted.options,
        rule=places.rule,
        racks=places.racks,
        seed=zlib.crc32(job.run.encode()),  # another sample each time, and the same when it goes on
    )
    folder = RunFolder(wanted.output, job.run)
    (wanted.output / SPARK_LOG).unlink(missing_ok=True)
    if folder.is_begun:
        folder.check_order(options)  # before Spark starts, which takes its time
    with _spark(wanted) as context, quiet_when_interrupted(context.setLogLevel):
        return run_fsck(context, options, job, on_progress)


@contextmanager
def _spark(wanted: Wanted) -> Iterator[Any]:
    """A Spark context: spark-submit's, or else one of our own."""
    from auditor.fsck.spark.session import is_here, open_spark, stop_spark, submitted_spark

    with ExitStack() as around:
        with quiet_when_interrupted():
            if _is_submitted(wanted, os.environ):
                context = submitted_spark()
            else:
                launch = _launch_environment(wanted, os.environ)
                master, settings = wanted.master or ALL_CORES, wanted.spark_settings
                python = settings.get(EXECUTORS_PYTHON, sys.executable)
                if is_here(master):
                    settings = {**around.enter_context(started_ahead(python)), **settings}
                with applied(launch):
                    context = open_spark(
                        master,
                        settings,
                        python=python,
                        log=wanted.output / SPARK_LOG,
                        suspects=launch.suspects,
                        start_timeout_s=wanted.start_timeout_s,
                    )
        around.callback(stop_spark, context)
        yield context


def job_of(wanted: Wanted, *, now_s: float) -> FsckJob:
    """The run that was killed, if there is one and it is not given up; else a new one. The output
    is held."""
    from auditor.fsck.results.run_folder import RunFolder, sweep, unfinished_runs

    sweep(wanted.output)
    killed = list(unfinished_runs(wanted.output))
    if wanted.is_anew:
        for name in killed:
            RunFolder(wanted.output, name).give_up()
    elif killed:
        log.info("fsck_run.resumed", run=killed[0])
    name = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now_s))
    return FsckJob(
        run=killed[0] if killed and not wanted.is_anew else name,
        output=wanted.output,
        checked_within_s=wanted.checked_within_s,
        time_budget_s=wanted.time_budget_s,
    )


# --- What it leaves -------------------------------------------------------------------------------


async def tell_daemon(settings: Settings, summary: Summary) -> None:
    """For status and metrics. The results stand whether or not that can be written."""
    try:
        async with visit(settings) as cluster:
            await write_last(cluster.store, cluster.ur, summary)
    except BookmenderError as error:
        log.error("fsck_run.not_told", error=str(error))


@dataclass(frozen=True, slots=True, kw_only=True)
class Marked:
    """``has_worker``: whether a bookmender daemon with a worker was there, which alone mends what
    is in our own queue."""

    published: Published
    has_worker: bool

    @property
    def count(self) -> int:
        """Ledgers whose marks stood then, made just now or before."""
        return self.published.new + self.published.known


async def preview(
    settings: Settings, folder: Path, faults: Sequence[Fault], show: Show
) -> Foreseen:
    """What ``publish`` would do, but for the switch. Raises SettingsError, UnavailableError."""
    async with visit(settings) as cluster:
        check_cluster(folder, await which_cluster(cluster))
        return await preview_here(cluster, faults, show)


async def preview_here(cluster: Visit, faults: Sequence[Fault], show: Show) -> Foreseen:
    view = await ViewSource(cluster.registration, SystemClock()).refresh()
    return await foresee(faults, cluster.manager, view, show)


async def publish(
    settings: Settings, folder: Path, run: str, faults: Sequence[Fault], show: Show
) -> Marked:
    """What stands in the results in ``folder``, of ``run``, for which it is noted. Raises
    SettingsError where they are another cluster's, RejectedError while auto-recovery is switched
    off, SessionLostError, UnavailableError."""
    async with visit(settings) as cluster:
        check_cluster(folder, await which_cluster(cluster))
        marked = await publish_here(cluster, faults, show)
        try:
            await note_marked(cluster.store, cluster.ur, run, marked.count)
        except BookmenderError as error:  # the marks stand
            log.error("fsck_marks.not_noted", error=str(error))
        return marked


async def publish_here(cluster: Visit, faults: Sequence[Fault], show: Show) -> Marked:
    store, ur, clock = cluster.store, cluster.ur, SystemClock()
    if await store.exists(payloads.disable_path(ur)) is not None:
        raise RejectedError(
            "auto-recovery is switched off, so nothing is marked: bookmender enable"
        )
    await prepare_tree(store, ur)
    views = ViewSource(cluster.registration, clock)
    await views.refresh()
    membership = await Membership.join(store, ur, by_hand())
    batcher = Batcher(store, [membership.guard])
    async with task_scope() as scope:
        scope.start(batcher.run())
        publisher = Publisher(
            BothQueues(store, batcher, ur, clock),
            Findings(store, batcher, ur, clock),
            cluster.manager,
            views,
        )
        published = await publisher.publish(faults, show)
        return Marked(published=published, has_worker=await _has_worker(membership))


async def _has_worker(membership: Membership) -> bool:
    return any(node.info.half is Half.WORKER for node in await membership.everybody())


def write_racks(folder: Path, racks: Mapping[BookieId, str]) -> None:
    """For whoever makes the report anew."""
    replace_file(folder / RACKS_FILE, json.dumps(dict(sorted(racks.items())), indent=2) + "\n")


def read_racks(folder: Path) -> dict[BookieId, str]:
    """None known where they cannot be read."""
    try:
        record = parse_record((folder / RACKS_FILE).read_bytes())
        return {BookieId(bookie): text(record, bookie) for bookie in record}
    except (OSError, CorruptionError):
        return {}
