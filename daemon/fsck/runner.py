"""One run of fsck from the command: checks what it needs before Spark starts, runs it, and
publishes its summary and marks.

The cluster is asked for what executors cannot know from the settings: the racks of bookies, and the
rule of the placement policy.
"""

from __future__ import annotations

import errno
import fcntl
import importlib
import logging
import os
import random
import signal
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import structlog

from auditor.fsck.damage_marker import (
    DamagedLedger,
    DamageMarker,
    MarkCounts,
    MarkPreview,
    Show,
    preview_marks,
)
from auditor.fsck.options import FeedChanges, FsckJob, FsckOptions, OnProgress
from auditor.fsck.results.folder import Cluster, check_cluster, keep_cluster
from auditor.fsck.results.summary import Summary, note_marked, write_last
from auditor.fsck.verdicts import Finding
from auditor.mark_reasons import Findings
from daemon.admin_session import AdminSession, admin_session, by_hand, order_event
from daemon.fsck.changes import Fetched, WhyWhole, acknowledge, fetch_changes
from daemon.fsck.spark_environment import LaunchEnvironment, applied, launch_environment
from daemon.home import has_name
from daemon.local.java import Java
from daemon.operations.feed import connection_of
from daemon.placement import load_placement, rule_of
from daemon.settings import Settings
from daemon.words import printable
from ledgers.clock import SystemClock
from ledgers.errors import (
    BookmenderError,
    RejectedError,
    SettingsError,
)
from ledgers.model import BookieId
from ledgers.placement import Rule
from ledgers.plain_files import plain, refuse_links
from ledgers.registration import read_instance_id
from ledgers.tasks import task_scope
from replication.cluster import ViewSource
from replication.history import Event, Kind
from replication.marks import prepare_tree
from replication.nodes import Membership, Role
from replication.transactions import Batcher

log = structlog.get_logger()

LOCK_FILE = ".lock"
SPARK_LOG = "spark.log"
"""Log file with Spark's messages of the last run. After the start Spark logs only errors."""
NO_PYSPARK = "PySpark is not installed. Install it: pip install 'bookmender[fsck]'"
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}
ALL_CORES = "local[*]"
EXECUTORS_PYTHON = "spark.pyspark.python"
_SUBMITTED = "PYSPARK_GATEWAY_PORT"
"""Variable that spark-submit sets, which has then started Spark already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """The arguments of ``bookmender fsck run``.

    ``options``: still without the rule, the racks and the seed. ``master``: None for the master of
    spark-submit, or without spark-submit for all cores of this machine. ``start_timeout_s``: time
    limit for Spark's start; unused with spark-submit. ``is_restart``: discard an unfinished run.
    ``client``: of the change feed, whose changes are checked; empty: all ledgers are.
    """

    options: FsckOptions
    output: Path
    master: str | None = None
    spark_settings: Mapping[str, str] = field(default_factory=dict)
    start_timeout_s: float = 300.0
    time_budget_s: float = 0.0
    is_restart: bool = False
    client: str = ""


# --- The run --------------------------------------------------------------------------------------


def run(
    request: RunRequest,
    facts: ClusterFacts,
    on_progress: OnProgress,
    changes: FeedChanges | None = None,
) -> Summary:
    """Run fsck, and return its summary. The caller has locked the output.

    ``changes``: what a run that follows the change feed checks (``changes_for``). If they are few,
    this process checks them; else the run is on Spark. Raises as ``run_fsck``.
    """
    from auditor.fsck.results.run_folder import RunFolder, next_run
    from auditor.fsck.run import InThisProcess, fits_in_this_process, run_fsck

    keep_cluster(request.output, facts.cluster)
    name = next_run(request.output, is_restart=request.is_restart, now_s=time.time())
    job = FsckJob(
        run=name, output=request.output, time_budget_s=request.time_budget_s, changes=changes
    )
    options = replace(
        request.options,
        rule=facts.rule,
        racks=facts.racks,
        seed=zlib.crc32(job.run.encode()),  # another sample in each run, the same if continued
    )
    folder = RunFolder(request.output, job.run)
    (request.output / SPARK_LOG).unlink(missing_ok=True)
    if folder.is_begun:
        log.info("fsck_run.resumed", run=job.run)
        # before Spark starts, which takes seconds
        folder.check_options(options, client=request.client)
    is_free = request.master is None and not _is_submitted(request, os.environ)
    if is_free and fits_in_this_process(options, job):
        return run_fsck(InThisProcess(), options, job, on_progress)
    with _spark(request) as context, quiet_when_interrupted(context.setLogLevel):
        from auditor.fsck.spark import Dispatch

        dispatch = Dispatch(context, f"fsck {job.run}")
        return run_fsck(dispatch, options, job, on_progress)


async def changes_for(settings: Settings, request: RunRequest) -> Fetched:
    """Return what a run with ``--changed`` checks: that of the unfinished run, or what the change
    feed tells. The caller has locked the output. Raises SettingsError, UnavailableError."""
    from auditor.fsck.results.run_folder import STATE, RunFolder, unfinished_runs

    unfinished = unfinished_runs(request.output)
    if unfinished and not request.is_restart:
        return Fetched(changes=RunFolder(request.output, unfinished[0]).changes, why=None)
    async with admin_session(settings) as cluster:
        return await fetch_changes(
            connection_of(cluster),
            client=request.client,
            level=request.options.level,
            state=request.output / STATE,
        )


async def acknowledge_run(
    settings: Settings, request: RunRequest, changes: FeedChanges, summary: Summary
) -> WhyWhole | None:
    """Acknowledge what a run with ``--changed`` has checked, as ``acknowledge`` does. Its results
    are stored. Raises SettingsError, UnavailableError."""
    from auditor.fsck.results.run_folder import STATE, Results

    unanswered: set[int] = set()  # because bookies did not answer
    if not changes.is_whole:
        rows = Results.open(request.output, summary.run).table(["ledger_id", "reasons"])
        for ledger_id, reasons in zip(*rows.to_pydict().values(), strict=True):
            if Finding.NOT_ANSWERED.value in reasons:
                unanswered.add(ledger_id)
    async with admin_session(settings) as cluster:
        return await acknowledge(
            connection_of(cluster),
            changes,
            level=summary.level,
            state=request.output / STATE,
            unanswered=unanswered,
        )


@contextmanager
def _spark(request: RunRequest) -> Iterator[Any]:
    """Yield a Spark context: spark-submit's, or a new one. It is stopped at the end."""
    launch = check_spark(request)
    from auditor.fsck.spark import open_spark, stop_spark, submitted_spark

    with quiet_when_interrupted():
        if launch is None:
            context = submitted_spark()
        else:
            with applied(launch):
                context = open_spark(
                    request.master or ALL_CORES,
                    request.spark_settings,
                    python=request.spark_settings.get(EXECUTORS_PYTHON, sys.executable),
                    log=request.output / SPARK_LOG,
                    start_timeout_s=request.start_timeout_s,
                )
    try:
        yield context
    finally:
        stop_spark(context)


# --- Before the run -------------------------------------------------------------------------------


def check_spark(
    request: RunRequest, environment: Mapping[str, str] = os.environ
) -> LaunchEnvironment | None:
    """Return what Spark starts with; None if spark-submit has started it. Raises SettingsError if
    something must be installed."""
    require_modules("pyspark", "pyarrow")
    if _is_submitted(request, environment):
        return None
    Java.find(environment)
    from auditor.fsck.spark import imported_pyspark, is_here

    return launch_environment(
        environment,
        is_here=is_here(request.master or ALL_CORES),
        pyspark_home=imported_pyspark()[0],
        home=None if has_name() else request.output,
    )


def _is_submitted(request: RunRequest, environment: Mapping[str, str]) -> bool:
    return request.master is None and _SUBMITTED in environment


def require_modules(*names: str) -> None:
    """Raise SettingsError if one of these modules, which the daemon does not need, cannot be
    imported."""
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise SettingsError(NO_PYSPARK) from error
        except Exception as error:  # the Python files of another Spark, of another release
            raise SettingsError(
                f"{name} cannot be imported ({error}). If PYTHONPATH names another Spark, unset it"
            ) from error


@contextmanager
def locked_output(folder: Path) -> Iterator[None]:
    """Create the folder, and lock it against other runs during the block. Raises SettingsError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        refuse_links(folder)
        lock = open(folder / LOCK_FILE, "a+", opener=plain)  # noqa: SIM115, it is closed below
    except OSError as error:
        raise SettingsError(f"--output {folder}: cannot be written to: {error.strerror}") from error
    with lock:  # the system releases the lock of a process that dies
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            who = f" ({holder})" if (holder := printable(lock.read(200).strip())) else ""
            raise SettingsError(
                f"--output {folder}: another run of fsck{who} writes there: wait for its end, or "
                "use another folder"
            ) from error
        except OSError as error:
            raise SettingsError(f"--output {folder}: cannot be locked: {error.strerror}") from error
        try:
            lock.truncate(0)  # removes the name of the last holder
            os.write(lock.fileno(), f"process {os.getpid()} on {socket.gethostname()}\n".encode())
            yield
        except OSError as error:
            if error.errno in _FULL and not error.filename:  # the error of a write names no file
                error.filename = str(folder)
            raise


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFacts:
    """The cluster, the present or last known racks, and the placement rule; None without a source
    of racks."""

    cluster: Cluster
    rule: Rule | None
    racks: Mapping[BookieId, str]


async def fetch_cluster_facts(settings: Settings) -> ClusterFacts:
    """Read the facts through a session of its own. Raises UnavailableError, SettingsError.

    That also shows whether the cluster answers, before Spark starts.
    """
    async with admin_session(settings) as cluster:
        clock, placement = SystemClock(), cluster.settings.placement
        views = ViewSource(cluster.registration, clock)
        await views.refresh()
        placing = await load_placement(
            placement,
            store=cluster.store,
            paths=cluster.paths,
            views=views,
            local=None,
            clock=clock,
            rng=random.Random(),
        )
        return ClusterFacts(
            cluster=await cluster_identity(cluster),
            rule=None if placing.rack_keeper is None else rule_of(placement),
            racks=dict(placing.racks.known),
        )


async def cluster_identity(cluster: AdminSession) -> Cluster:
    return Cluster(
        instance_id=await read_instance_id(cluster.store, cluster.root) or "",
        metadata_service_uri=cluster.settings.metadata_service_uri,
    )


# --- The summary, and marks -----------------------------------------------------------------------


async def publish_summary(settings: Settings, summary: Summary) -> None:
    """Write the summary to ZooKeeper, for status and metrics. An error is logged: the results are
    complete without it."""
    try:
        async with admin_session(settings) as cluster:
            await write_last(cluster.store, cluster.paths, summary)
            await cluster.note_order(
                Event(
                    kind=Kind.CHECK_FINISHED,
                    cause="fsck",
                    ledger_count=summary.counts.ledgers,
                    counts=dict(summary.counts.findings),
                )
            )
    except BookmenderError as error:
        log.error("fsck_run.publish_failed", error=str(error))


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkResult:
    """The counts of the marks. ``has_worker``: True if a bookmender worker was running, which alone
    repairs what is in our private queue."""

    counts: MarkCounts
    has_worker: bool


async def preview_damaged(
    settings: Settings, folder: Path, damaged: Sequence[DamagedLedger], show: Show
) -> MarkPreview:
    """Return what ``mark_damaged`` would do if auto-recovery is enabled. Raises SettingsError,
    UnavailableError."""
    async with admin_session(settings) as cluster:
        check_cluster(folder, await cluster_identity(cluster))
        view = await ViewSource(cluster.registration, SystemClock()).refresh()
        return await preview_marks(damaged, cluster.manager, view, show)


async def mark_damaged(
    settings: Settings, folder: Path, run: str, damaged: Sequence[DamagedLedger], show: Show
) -> MarkResult:
    """Mark the damaged ledgers that ``run`` found, whose results are in ``folder``, and record
    their number. Raises SettingsError if the results belong to another cluster, RejectedError while
    auto-recovery is disabled, SessionLostError, UnavailableError."""
    async with admin_session(settings) as cluster:
        store, paths, clock = cluster.store, cluster.paths, SystemClock()
        check_cluster(folder, await cluster_identity(cluster))
        if await store.exists(paths.disable) is not None:
            raise RejectedError(
                "auto-recovery is disabled, so nothing is marked; enable it with bookmender enable"
            )
        await prepare_tree(store, paths)
        views = ViewSource(cluster.registration, clock)
        await views.refresh()
        membership = await Membership.join(store, paths, by_hand())
        batcher = Batcher(store, [membership.guard])
        async with task_scope() as scope:
            scope.start(batcher.run())
            marker = DamageMarker(
                Findings(store, batcher, paths, clock),
                cluster.manager,
                views,
            )
            counts = await marker.mark(damaged, show)
            roles = {node.info.role for node in await membership.live_nodes()}
        marked_count = counts.new + counts.known
        await cluster.note_order(order_event("fsck mark", ledger_count=marked_count))
        try:
            await note_marked(store, paths, run, marked_count)
        except BookmenderError as error:  # the marks are already written
            log.error("fsck_marks.record_failed", error=str(error))
        return MarkResult(counts=counts, has_worker=Role.WORKER in roles)


# --- Interruptions --------------------------------------------------------------------------------

LOG_LEVEL_WAIT_S = 1.0
"""Time for the JVM to change its log level."""


@contextmanager
def quiet_when_interrupted(
    set_log_level: Callable[[str], None] = lambda level: None,
) -> Iterator[None]:
    """Silence Spark's logs on Ctrl-C: errors of interrupted tasks and JVM calls are expected then.

    Spark's own handler ends the tasks before Python raises KeyboardInterrupt. The level is set on
    another thread, because this one may be in the middle of a call to the JVM.
    """
    before = signal.getsignal(signal.SIGINT)

    def interrupt(number: int, frame: FrameType | None) -> None:
        silencer = threading.Thread(target=set_log_level, args=("OFF",), daemon=True)
        silencer.start()
        silencer.join(LOG_LEVEL_WAIT_S)
        logging.disable()  # silences py4j
        assert callable(before)
        before(number, frame)

    if callable(before):
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is interrupt:  # unless Spark has replaced it
            signal.signal(signal.SIGINT, before)
