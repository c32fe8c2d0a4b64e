"""One run of fsck from a command: what it needs is looked for before Spark starts, what it leaves
is told after.

The cluster is asked for what executors cannot know of the settings: where bookies are, and by which
rule.

Decide which environment variables Spark starts with, and which of them make a start impossible.

A storage host may have the variables of another Spark. A run on this machine uses none of them:
PySpark brings all that the run needs. On a cluster the variables may be what it takes to reach that
cluster, so they stay; a variable with which no start can succeed is named before anything starts.

Keep Spark quiet when a run is interrupted.

How a run of fsck that does not come to its end is told.
"""

import errno
import fcntl
import importlib
import importlib.util
import json
import logging
import os
import random
import re
import shlex
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any

import click
import structlog

from auditor.findings import Findings
from auditor.fsck.levels import FsckJob, FsckOptions, OnProgress
from auditor.fsck.publishing import Fault, Foreseen, Published, Publisher, Show, foresee
from auditor.fsck.results.cluster import Cluster, check_cluster, keep_cluster
from auditor.fsck.results.files import replace_file
from auditor.fsck.results.summary import Summary, note_marked, write_last
from auditor.marker import BothQueues
from daemon.admin_session import AdminSession, admin_session, by_hand
from daemon.cli.main import EXIT_UNKNOWN
from daemon.cli.progress import echo_notes, printable
from daemon.fsck.forking import started_ahead
from daemon.local.java import OPTION_VARIABLES, Java
from daemon.placement import load_placement, rule_of
from daemon.settings import Settings
from ledgers.clock import SystemClock
from ledgers.errors import (
    BookmenderError,
    CorruptionError,
    RejectedError,
    SessionLostError,
    SettingsError,
    UnavailableError,
)
from ledgers.model import BookieId
from ledgers.placement import Rule
from ledgers.registration import read_instance_id
from ledgers.tasks import task_scope
from replication.cluster import ViewSource
from replication.marks import prepare_tree
from replication.nodes import Membership, Role
from replication.transactions import Batcher
from replication.znodes import parse_record, text_field

LOOPBACK = "127.0.0.1"
EXECUTORS_PYTHON = "spark.pyspark.python"
_OF_ANOTHER_SPARK = re.compile(r"SPARK_.*|PYSPARK_.*|(HADOOP|YARN)_CONF_DIR|MASTER")
_KEPT = {"SPARK_LOCAL_DIRS"}
"""Where this host has room for temporary files does not depend on the Spark that uses it."""
_CHANGES_SPARK = (
    "SPARK_HOME",
    "SPARK_CONF_DIR",
    "SPARK_LOCAL_DIRS",
    "SPARK_LOCAL_IP",
    "SPARK_LOCAL_HOSTNAME",
    "SPARK_SUBMIT_OPTS",
    "SPARK_DIST_CLASSPATH",
    "PYSPARK_SUBMIT_ARGS",
    "HADOOP_CONF_DIR",
    "YARN_CONF_DIR",
    *OPTION_VARIABLES,
)
"""Variables that may be the reason of a failed start, where Spark gets them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PySpark:
    """The PySpark that this process imports. ``home``: its folder, with ``bin/spark-submit`` and
    ``jars``."""

    home: Path
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchEnvironment:
    """What Spark starts with. ``variables``: all that it gets. ``ignored``: names that this process
    has and Spark does not get, sorted. ``suspects``: names that Spark gets and that may be the
    reason of a failed start."""

    variables: Mapping[str, str]
    ignored: tuple[str, ...] = ()
    suspects: tuple[str, ...] = ()


# --- The decision ---------------------------------------------------------------------------------


def launch_environment(
    master: str,
    environment: Mapping[str, str],
    *,
    is_here: bool,
    pyspark: PySpark,
    spark_settings: Mapping[str, str],
) -> LaunchEnvironment:
    """Decide from the environment of this process.

    ``is_here``: whether all of Spark runs on this machine. Raises SettingsError, which names the
    variable or option with which Spark cannot start.
    """
    if is_here:
        python = spark_settings.get(EXECUTORS_PYTHON)
        if python and shutil.which(python, path=environment.get("PATH")) is None:
            raise SettingsError(
                f"--spark-conf {EXECUTORS_PYTHON} is {python}, and there is no such program on this machine: "
                "leave the option out, or correct the path"
            )
        variables = _without_another_spark(environment, pyspark)
    else:
        check_for_cluster(master, environment, version=pyspark.version)
        variables = dict(environment)
    return LaunchEnvironment(
        variables=variables,
        ignored=tuple(
            sorted(name for name, value in environment.items() if value != variables.get(name, ""))
        ),
        suspects=tuple(
            name
            for name in _CHANGES_SPARK
            if environment.get(name) and environment[name] == variables.get(name)
        ),
    )


def _without_another_spark(environment: Mapping[str, str], pyspark: PySpark) -> dict[str, str]:
    kept = {
        name: value
        for name, value in environment.items()
        if name in _KEPT or not _OF_ANOTHER_SPARK.fullmatch(name)
    }
    return {
        **kept,
        # Without it PySpark looks for a Spark in the parent of the current folder first.
        "SPARK_HOME": str(pyspark.home),
        # Without it Spark looks up the name of this host, which may not resolve.
        "SPARK_LOCAL_IP": LOOPBACK,
    }


def check_for_cluster(master: str, environment: Mapping[str, str], *, version: str) -> None:
    """Check the variables for a start on a cluster. ``version``: PySpark's, as in 4.1.0. Raises
    SettingsError."""
    if "SPARK_REMOTE" in environment:
        raise SettingsError(
            "SPARK_REMOTE is set, for Spark Connect, which fsck cannot use: unset it, and name the cluster's master "
            "with --master"
        )
    arguments = environment.get("PYSPARK_SUBMIT_ARGS", "")
    try:
        options = shlex.split(arguments)
    except ValueError as error:
        raise SettingsError(
            f"PYSPARK_SUBMIT_ARGS cannot be parsed ({error}): unset it, or correct {arguments!r}"
        ) from error
    for option in options:
        if option.partition("=")[0] in {"--master", "--remote"}:
            raise SettingsError(
                f"PYSPARK_SUBMIT_ARGS has {option}, which goes against --master {master}: unset it, and say with "
                "--spark-conf what else it has"
            )
    if options and options[-1] != "pyspark-shell":
        raise SettingsError(
            "PYSPARK_SUBMIT_ARGS does not end with pyspark-shell, so that Spark would start nothing: unset it, and "
            "say with --spark-conf what it has"
        )
    if home := environment.get("SPARK_HOME"):
        _check_home(Path(home), version)


def _check_home(home: Path, version: str) -> None:
    remedy = f"unset SPARK_HOME, so that PySpark {version} runs its own, or set it to a Spark of that version"
    if not (home / "bin/spark-submit").is_file():
        raise SettingsError(f"SPARK_HOME is {home}, which has no bin/spark-submit: {remedy}")
    there = [
        found[1]
        for jar in home.glob("jars/spark-core_*.jar")
        if (found := re.search(r"_[\d.]+-(.+)\.jar$", jar.name))
    ]
    if not any(
        each == version or each.startswith((f"{version}-", f"{version}.")) for each in there
    ):
        which = f"Spark {there[0]}" if there else "no Spark (jars/spark-core_*.jar)"
        raise SettingsError(f"SPARK_HOME is {home}, which has {which}: {remedy}")


def check_origin(folder: Path, installed: Path | None, environment: Mapping[str, str]) -> None:
    """Check that the PySpark in ``folder``, which Python imports, is the ``installed`` one.

    The profile of a host with another Spark often sets PYTHONPATH to that Spark's Python files:
    they come first, and are of another release. ``installed``: None where no package tells its
    folder. Raises SettingsError.
    """
    if installed is None or folder == installed:
        return
    places = environment.get("PYTHONPATH", "").split(os.pathsep)
    if any(place and Path(place) in (folder, *folder.parents) for place in places):
        remedy = "unset PYTHONPATH, which names it"
    else:
        remedy = "take it out of Python's path"
    raise SettingsError(f"PySpark would be imported from {folder}, not from {installed}: {remedy}")


# --- Its surroundings -----------------------------------------------------------------------------


def check_import(environment: Mapping[str, str]) -> None:
    """Check that Python imports the PySpark that is installed for bookmender. Raises
    SettingsError."""
    spec = importlib.util.find_spec("pyspark")
    if spec is None or spec.origin is None:
        return  # the import says what to install
    check_origin(Path(spec.origin).resolve().parent, _installed_folder(), environment)


def _installed_folder() -> Path | None:
    try:
        found = metadata.distribution("pyspark").locate_file("pyspark")
    except metadata.PackageNotFoundError:
        return None
    folder = Path(str(found)).resolve()
    return folder if folder.is_dir() else None


@contextmanager
def applied(launch: LaunchEnvironment) -> Iterator[None]:
    """Give this process the variables that Spark is to start with: PySpark hands on its own."""
    before = dict(os.environ)
    _set_environment(launch.variables)
    try:
        yield
    finally:
        _set_environment(before)


def _set_environment(environment: Mapping[str, str]) -> None:
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)


HUSH_S = 1.0
"""How long a JVM may take to be told to say no more."""


@contextmanager
def quiet_when_interrupted(
    set_log_level: Callable[[str], None] = lambda level: None,
) -> Iterator[None]:
    """What Spark's tasks say when they are cut short, or a call to the JVM, is no news to whoever
    pressed Ctrl-C.

    Spark's own handler ends them before anybody hears of it as an exception. The level is set on a
    thread of its own: this one may be in the midst of such a call.
    """
    before = signal.getsignal(signal.SIGINT)

    def interrupt(number: int, frame: FrameType | None) -> None:
        hushing = threading.Thread(target=set_log_level, args=("OFF",), daemon=True)
        hushing.start()
        hushing.join(HUSH_S)
        logging.disable()  # py4j's
        assert callable(before)
        before(number, frame)

    if callable(before):
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is interrupt:  # Spark puts one of its own in its place
            signal.signal(signal.SIGINT, before)


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


async def find_places(cluster: AdminSession) -> Places:
    clock = SystemClock()
    views = ViewSource(cluster.registration, clock)
    await views.refresh()
    placing = await load_placement(
        cluster.settings.placement,
        store=cluster.store,
        paths=cluster.paths,
        views=views,
        local=None,
        clock=clock,
        rng=random.Random(),
    )
    rule = None if placing.rack_keeper is None else rule_of(cluster.settings.placement)
    return Places(cluster=await which_cluster(cluster), rule=rule, racks=dict(placing.racks.known))


async def which_cluster(cluster: AdminSession) -> Cluster:
    settings = cluster.settings
    return Cluster(
        instance_id=await read_instance_id(cluster.store, settings.uri.root) or "",
        metadata_service_uri=settings.metadata_service_uri,
    )


# --- The run --------------------------------------------------------------------------------------


async def look_up_places(settings: Settings) -> Places:
    """Whether the cluster is there shows as well, before Spark starts. Raises UnavailableError,
    SettingsError."""
    async with admin_session(settings) as cluster:
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
        async with admin_session(settings) as cluster:
            await write_last(cluster.store, cluster.paths, summary)
    except BookmenderError as error:
        log.error("fsck_run.not_told", error=str(error))


@dataclass(frozen=True, slots=True, kw_only=True)
class Marked:
    """``has_worker``: whether a bookmender daemon with a worker was there, which alone mends what
    is in our private queue."""

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
    async with admin_session(settings) as cluster:
        check_cluster(folder, await which_cluster(cluster))
        return await preview_here(cluster, faults, show)


async def preview_here(cluster: AdminSession, faults: Sequence[Fault], show: Show) -> Foreseen:
    view = await ViewSource(cluster.registration, SystemClock()).refresh()
    return await foresee(faults, cluster.manager, view, show)


async def publish(
    settings: Settings, folder: Path, run: str, faults: Sequence[Fault], show: Show
) -> Marked:
    """What stands in the results in ``folder``, of ``run``, for which it is noted. Raises
    SettingsError where they are another cluster's, RejectedError while auto-recovery is switched
    off, SessionLostError, UnavailableError."""
    async with admin_session(settings) as cluster:
        check_cluster(folder, await which_cluster(cluster))
        marked = await publish_here(cluster, faults, show)
        try:
            await note_marked(cluster.store, cluster.paths, run, marked.count)
        except BookmenderError as error:  # the marks stand
            log.error("fsck_marks.not_noted", error=str(error))
        return marked


async def publish_here(cluster: AdminSession, faults: Sequence[Fault], show: Show) -> Marked:
    store, paths, clock = cluster.store, cluster.paths, SystemClock()
    if await store.exists(paths.disable) is not None:
        raise RejectedError(
            "auto-recovery is switched off, so nothing is marked: bookmender enable"
        )
    await prepare_tree(store, paths)
    views = ViewSource(cluster.registration, clock)
    await views.refresh()
    membership = await Membership.join(store, paths, by_hand())
    batcher = Batcher(store, [membership.guard])
    async with task_scope() as scope:
        scope.start(batcher.run())
        publisher = Publisher(
            BothQueues(store, batcher, paths, clock),
            Findings(store, batcher, paths, clock),
            cluster.manager,
            views,
        )
        published = await publisher.publish(faults, show)
        return Marked(published=published, has_worker=await _has_worker(membership))


async def _has_worker(membership: Membership) -> bool:
    return any(node.info.role is Role.WORKER for node in await membership.live_nodes())


def write_racks(folder: Path, racks: Mapping[BookieId, str]) -> None:
    """For whoever makes the report anew."""
    replace_file(folder / RACKS_FILE, json.dumps(dict(sorted(racks.items())), indent=2) + "\n")


def read_racks(folder: Path) -> dict[BookieId, str]:
    """None known where they cannot be read."""
    try:
        record = parse_record((folder / RACKS_FILE).read_bytes())
        return {BookieId(bookie): text_field(record, bookie) for bookie in record}
    except (OSError, CorruptionError):
        return {}


GOES_ON = "what was looked at is kept: the same command{} goes on from there"
BEGINS_AGAIN = "no part of it was finished: the same command begins at the first"


@contextmanager
def failing_as_unknown(advice: Callable[[], str]) -> Iterator[None]:
    """Neither a slip of ours, or of Spark's, nor what cannot be read is to look like damage: they
    would exit 1.

    ``advice``: on what stands then; whoever presses Ctrl-C is told it, too.
    """
    try:
        yield
    except KeyboardInterrupt:
        echo_notes([f"interrupted; {advice()}"])
        raise
    except (
        SettingsError,
        UnavailableError,
        SessionLostError,
        OSError,
        click.ClickException,
        click.exceptions.Exit,
    ):
        raise
    except BookmenderError as error:
        raise UnavailableError(f"could not tell: {error}") from error
    except Exception as error:
        traceback.print_exc()
        echo_notes([f"could not tell; {advice()}"])
        raise click.exceptions.Exit(EXIT_UNKNOWN) from error


def what_stays(wanted: Wanted) -> str:
    """Of a run that did not come to its end."""
    from auditor.fsck.results.run_folder import RunFolder, unfinished_runs

    output = wanted.output
    if not any(RunFolder(output, run).has_results for run in unfinished_runs(output)):
        return BEGINS_AGAIN
    return GOES_ON.format(", without --anew," if wanted.is_anew else "")
