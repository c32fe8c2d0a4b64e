"""``bookmender fsck``: the command group, its options, and how each command ends."""

import asyncio
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from auditor.fsck.damage_marker import DamagedLedger, MarkPreview, damaged_ledgers
from auditor.fsck.options import (
    FeedChanges,
    FsckOptions,
    FsckProgress,
    Level,
    OnProgress,
    SessionTimeouts,
)
from auditor.fsck.results.summary import Summary
from auditor.fsck.verdicts import Grade
from daemon.answers import as_json
from daemon.cli.main import (
    EXIT_FAILED,
    EXIT_UNKNOWN,
    CommandGroup,
    LedgerId,
    config_option,
    format_option,
    json_option,
)
from daemon.cli.option_types import Duration, Folder, Limit
from daemon.cli.output import echo
from daemon.cli.paths import LocalPath
from daemon.cli.progress import Line, ProgressLine, echo_notes
from daemon.cli.session import log_errors_only, settings_for_command
from daemon.fsck.advice import advice_for, headline, tails_text
from daemon.fsck.changes import client_name
from daemon.fsck.runner import (
    SPARK_LOG,
    MarkResult,
    RunRequest,
    acknowledge_run,
    changes_for,
    check_spark,
    fetch_cluster_facts,
    locked_output,
    mark_damaged,
    preview_damaged,
    publish_summary,
    require_modules,
    run,
)
from daemon.fsck.texts import (
    Meter,
    history_lines,
    history_record,
    mark_lines,
    marks_record,
    run_changes_record,
    summary_lines,
)
from daemon.settings import Settings
from daemon.words import printable
from ledgers.codec.layout import MetadataUri
from ledgers.errors import BookmenderError, SessionLostError, SettingsError, UnavailableError

if TYPE_CHECKING:
    from auditor.fsck.results.run_folder import Results

URI_VARIABLE = "BOOKMENDER_METADATA_SERVICE_URI"


# Types of options: functions of the text. Click adds the name of the option to their errors.


def parse_share(text: str) -> float:
    """Return the share, above 0 and up to 1, of a percentage such as ``5%`` or ``0.5%``."""
    found = re.fullmatch(r"([0-9]{1,3}(?:\.[0-9]{1,6})?)%", text)
    share = float(found[1]) / 100 if found else 0.0
    if not 0 < share <= 1:
        raise click.BadParameter(f"{text!r} is not a percentage such as 5% or 0.5%")
    return share


def parse_spark_setting(text: str) -> tuple[str, str]:
    """Return the name and the value of a Spark setting such as ``spark.executor.memory=2g``."""
    key, equals, setting = text.partition("=")
    if not equals or not key.startswith("spark."):
        raise click.BadParameter(
            f"{text!r} is not a Spark setting such as spark.executor.memory=2g"
        )
    return key, setting


class ResultsFolder(Folder):
    """A folder whose name is no output format, which other commands take as ``--output``."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value in ("text", "json"):
            self.fail(f"this is the folder of the results. Format: -o {value}", param, ctx)
        return super().convert(value, param, ctx)


MASTERS = re.compile(
    r"local(\[(\*|[1-9][0-9]*)(, *[0-9]+)?\])?|local-cluster\[.+\]|yarn"
    r"|spark://[^/,\s]+:[0-9]+(,[^/,\s]+:[0-9]+)*|(?!spark:|local:)[a-z][a-z0-9+.-]*://\S+"
)


def parse_master(text: str) -> str:
    """Return a master: ``local[4]``, ``spark://host:7077``, ``yarn``, or ``scheme://…`` of another
    cluster manager. Spark would refuse other values later, with a less helpful message."""
    if text == "":  # from a script variable that is not set
        raise click.BadParameter("the value is empty; without the option it is local[*]")
    if not MASTERS.fullmatch(text):
        kinds = "local[4], local[*], spark://host:7077, yarn, k8s://https://host:443"
        raise click.BadParameter(f"{text!r} is not a Spark master; use one of {kinds}")
    return text


# Without --output, which names the folder of the results.
text_option = format_option("-o")
uri_option = click.option(
    "--metadata-service-uri", "uri", metavar="URI", help="The cluster, instead of the setting."
)
mark_option = click.option("--mark", is_flag=True, help="Mark damaged ledgers for repair.")


def settings_for(
    uri: str | None, config: Path | None, environment: Mapping[str, str] = os.environ
) -> Settings:
    """Return the settings as for other commands, with ``uri`` if given. Raises SettingsError."""
    if not uri:
        return settings_for_command(config, environment)
    try:
        MetadataUri.parse(uri)
    except SettingsError as error:
        raise SettingsError(f"--metadata-service-uri: {error}") from error
    return settings_for_command(config, {**environment, URI_VARIABLE: uri})


def options_for(settings: Settings, level: Level, **limits: float | None) -> FsckOptions:
    """Return the options that executors need. ``limits``: more of them; None: the default. Raises
    SettingsError."""
    given: dict[str, Any] = {name: limit for name, limit in limits.items() if limit is not None}
    return FsckOptions(
        metadata_service_uri=settings.metadata_service_uri,
        level=level,
        idle_open_after_s=settings.checks.counts_as_idle_after_s,
        timeouts=SessionTimeouts(
            session_s=settings.zookeeper.session_timeout_s,
            connect_s=settings.zookeeper.connect_timeout_s,
        ),
        security=settings.security,
        default_password=settings.replication.default_password,
        default_digest_type=settings.replication.default_digest_type,
        **given,
    )


CHECK_RESULTS = "check that DIR has the complete results of a run"
CHECKED_AGAIN = "The next run with --changed checks the same ledgers again"


@click.group(cls=CommandGroup)
def fsck() -> None:
    """Check every copy of every ledger, on Spark.

    \b
      bookmender fsck run --level full --output DIR    check every copy of every entry
      bookmender fsck run --changed --output DIR       check only what changed since the last time
      bookmender fsck mark DIR --mark                  mark what it found, for repair
      bookmender fsck show DIR LEDGER                  show what was found for one ledger

    docs/fsck.md has all steps.
    """


@fsck.command("run")
@click.option(
    "--output",
    "folder",
    metavar="DIR",
    required=True,
    type=ResultsFolder(),
    help="Folder for the results.",
)
@click.option(
    "--level",
    type=click.Choice([level.value for level in Level]),
    help="How much to read.  [default: ends]",
)
@click.option(
    "--sample",
    "sample_share",
    metavar="PERCENT",
    type=parse_share,
    help="Level sample with this share.  [default: 1%]",
)
@click.option(
    "--master",
    metavar="MASTER",
    type=parse_master,
    help="Spark master, such as local[4] or yarn.",
)
@click.option(
    "--spark-conf",
    metavar="KEY=VALUE",
    type=parse_spark_setting,
    multiple=True,
    help="Spark setting. May be repeated.",
)
@click.option(
    "--start-within",
    "start_timeout_s",
    type=Duration(),
    default="5m",
    show_default=True,
    help="Deadline for the start of Spark.",
)
@click.option("--for", "time_budget_s", type=Duration(), help="Time limit, such as 2h.")
@click.option(
    "--reads-per-s", type=Limit("entries_per_s"), help="Limit in entries, for all executors."
)
@click.option(
    "--bytes-per-s", type=Limit("bytes_per_s"), help="Limit in stored bytes, for all executors."
)
@click.option(
    "--reads-in-flight",
    "reads_in_flight_per_bookie",
    type=Limit("reads_in_flight_per_bookie"),
    help="Limit per executor and bookie.  [default: 64]",
)
@click.option("--changed", is_flag=True, help="Check only what changed since the last such run.")
@click.option(
    "--client",
    metavar="NAME",
    help="Name in the change feed, with --changed.  [default: fsck-LEVEL]",
)
@click.option("--restart", is_flag=True, help="Discard an unfinished run, start a new one.")
@mark_option
@uri_option
@config_option
@text_option
@json_option
def run_command(
    folder: Path,
    level: str | None,
    master: str | None,
    spark_conf: tuple[tuple[str, str], ...],
    start_timeout_s: int,
    time_budget_s: int | None,
    changed: bool,
    client: str | None,
    restart: bool,
    mark: bool,
    uri: str | None,
    config: Path | None,
    output: str,
    **limits: float | None,
) -> None:
    """Check all ledgers, or those that changed.

    It writes only its results, and marks ledgers only with --mark.

    \b
    Levels; each one finds everything that the level before it finds:
      metadata   unreadable metadata, absent bookies, misplaced copies; asks no bookie
      ends       reads the first and last entry of each copy of each fragment
      sample     also reads a share of the other entries
      full       reads every entry of every copy, and compares the copies

    With --changed, the first run checks all ledgers, later ones what the change feed tells. The
    same command continues an interrupted run. Verdicts and output: docs/fsck.md.

    Exit codes: 0 all checked ledgers are whole. 1 something is wrong. 2 wrong usage. 3 nothing is
    known to be wrong, but some ledgers are unknown or hidden, or the run failed.
    """
    share = limits["sample_share"]
    chosen = Level(level) if level else Level.ENDS if share is None else Level.SAMPLE
    if share is not None and chosen is not Level.SAMPLE:
        raise click.UsageError(f"--sample requires --level sample, not {chosen.value}")
    if client is not None and not changed:
        raise click.UsageError("--client needs --changed.")
    if changed and time_budget_s:
        raise click.UsageError("--changed needs a run without a time limit: leave --for out.")
    settings = settings_for(uri, config)
    log_errors_only(settings)
    request = RunRequest(
        options=options_for(settings, chosen, **limits),
        output=folder,
        master=master,
        spark_settings=dict(spark_conf),
        start_timeout_s=start_timeout_s,
        time_budget_s=time_budget_s or 0,
        is_restart=restart,
        client=(client or client_name(chosen)) if changed else "",
    )
    if changed:
        require_modules("pyarrow")  # Spark only if there is much to check
        from auditor.fsck.tasks import hide_pandas

        hide_pandas()
    else:
        launch = check_spark(request)
        if launch is not None and launch.ignored:
            echo_notes([f"ignored variables of another Spark: {', '.join(launch.ignored)}"])
    with locked_output(folder):
        changes, is_acknowledged = None, False
        with failures_exit_unknown(lambda: resume_hint(request)):
            if changed:
                fetched = asyncio.run(changes_for(settings, request))
                echo_notes(fetched.notes())
                changes = fetched.changes
            facts = asyncio.run(fetch_cluster_facts(settings))
            try:
                with showing_progress() as on_progress:
                    summary = run(request, facts, on_progress, changes)
            except (UnavailableError, SessionLostError, OSError):
                log = folder / SPARK_LOG
                messages = f"; Spark's messages are in {log}" if log.exists() else ""
                echo_notes([f"the run failed; {resume_hint(request)}{messages}"])
                raise
            if changes is not None:
                is_acknowledged = _acknowledge(settings, request, changes, summary)
        with failures_exit_unknown(
            lambda: f"the run is complete: see bookmender fsck mark {folder}"
        ):
            asyncio.run(publish_summary(settings, summary))
            record, lines = _finish(settings, folder, summary, is_marking=mark)
    if changes is not None:
        record["changes"] = run_changes_record(changes, is_acknowledged=is_acknowledged)
    echo(output, record, "\n".join(lines))
    sys.exit(summary.exit_code)


def _acknowledge(
    settings: Settings, request: RunRequest, changes: FeedChanges, summary: Summary
) -> bool:
    """Acknowledge what the run checked. Return False if this failed: the results hold, and a later
    run is given the same ledgers again."""
    try:
        why = asyncio.run(acknowledge_run(settings, request, changes, summary))
    except BookmenderError as error:
        echo_notes([f"not acknowledged: {printable(str(error))}. {CHECKED_AGAIN}"])
        return False
    if why is not None:
        text = why.text(changes.client)
        echo_notes([f"not acknowledged: {text}. The next run with --changed checks all ledgers"])
    return why is None


def _finish(
    settings: Settings, output: Path, summary: Summary, *, is_marking: bool
) -> tuple[dict[str, Any], list[str]]:
    """Write the report and the marks. Return the output for programs and for people."""
    from auditor.fsck.results.report import write_report
    from auditor.fsck.results.run_folder import Results

    results = Results.open(output, summary.run)
    report = write_report(
        results,
        headline=headline(summary),
        tails=tails_text(summary.counts),
        advice=advice_for(summary),
    )
    damaged = _damaged(results)
    outcome: MarkResult | MarkPreview | None = None
    try:
        outcome = _mark(settings, results, damaged, is_marking=is_marking)
    except BookmenderError as error:  # the findings are printed nevertheless
        failed = "not marked" if is_marking else "cannot check for changes since the run"
        echo_notes([f"{failed}: {error}"])
    record = {
        **summary.to_record(),
        "output": str(output),
        "report": str(report),
        "marks": marks_record(damaged, outcome),
    }
    lines = [*summary_lines(summary), "", *mark_lines(damaged, outcome), f"report: {report}"]
    return record, lines


def _damaged(results: "Results") -> list[DamagedLedger]:
    with failures_exit_unknown(lambda: CHECK_RESULTS):
        return damaged_ledgers(results.wrong())


def _mark(
    settings: Settings, results: "Results", damaged: Sequence[DamagedLedger], *, is_marking: bool
) -> MarkResult | MarkPreview:
    """Mark the ledgers, or return what would be marked. Asks the cluster only if there are any."""
    if not damaged:
        return MarkPreview()
    with ProgressLine() as line:
        if is_marking:
            return asyncio.run(
                mark_damaged(settings, results.folder, results.summary.run, damaged, line.show)
            )
        return asyncio.run(preview_damaged(settings, results.folder, damaged, line.show))


@fsck.command("mark")
@click.argument("results", metavar="DIR[@RUN]", type=LocalPath())
@mark_option
@uri_option
@config_option
@text_option
@json_option
def mark_command(
    results: str, mark: bool, uri: str | None, config: Path | None, output: str
) -> None:
    """Mark the damaged ledgers that a run found.

    \b
      bookmender fsck mark DIR           show what would be marked
      bookmender fsck mark DIR --mark    mark it

    Workers then repair these ledgers. DIR@RUN names a run; DIR alone is the last one. Ledgers that
    were deleted, or whose metadata changed since the run, are left out.
    """
    settings = settings_for(uri, config)
    log_errors_only(settings)
    require_modules("pyarrow")
    from auditor.fsck.results.run_folder import Results

    with failures_exit_unknown(lambda: CHECK_RESULTS):
        found = Results.named(results)
    damaged = _damaged(found)
    outcome = _mark(settings, found, damaged, is_marking=mark)
    echo(output, marks_record(damaged, outcome), "\n".join(mark_lines(damaged, outcome)))


@fsck.command("show")
@click.argument("folder", metavar="DIR", type=LocalPath(path_type=Path))
@click.argument("ledger_id", metavar="LEDGER", type=LedgerId())
@text_option
@json_option
def show_command(folder: Path, ledger_id: int, output: str) -> None:
    """Show what runs found for a ledger.

    That is the last verdict with its evidence, and the verdicts of earlier runs at closer levels.

    Exit codes: 0 whole. 1 wrong by one of these verdicts. 3 unknown, or not checked by any run in
    DIR.
    """
    require_modules("pyarrow")
    from auditor.fsck.results.run_folder import verdict_history

    with failures_exit_unknown(lambda: CHECK_RESULTS):
        history = verdict_history(folder, ledger_id)
    if output == "json":
        click.echo(as_json(history_record(ledger_id, history)))
    elif history:
        click.echo("\n".join(history_lines(history)))
    else:
        echo_notes([f"{folder}: no run with rows has checked ledger {ledger_id}"])
    if any(each.verdict.is_wrong for each in history):
        sys.exit(EXIT_FAILED)
    is_known = history and history[0].verdict.grade is not Grade.UNKNOWN
    sys.exit(0 if is_known else EXIT_UNKNOWN)


# --- Progress, errors and interruptions -----------------------------------------------------------


@contextmanager
def showing_progress() -> Iterator[OnProgress]:
    """Show progress on standard error: a line, rewritten on a terminal, else a new one every ten
    seconds."""
    meter = Meter()
    with Line() as line:
        line.write("starting", now_s=time.monotonic())

        def show(progress: FsckProgress) -> None:
            is_news = progress.phase != meter.phase
            text = f"{progress.phase}: {meter.text(progress)}"
            line.write(text, now_s=time.monotonic(), is_news=is_news)

        yield show


@contextmanager
def failures_exit_unknown(advice: Callable[[], str]) -> Iterator[None]:
    """Exit with ``EXIT_UNKNOWN`` on an unexpected error, or if something cannot be read. Python's
    own exit code 1 would mean damage.

    ``advice``: returns what to do next; also printed on Ctrl-C.
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
        raise UnavailableError(f"the result is unknown: {error}") from error
    except Exception as error:
        traceback.print_exc()
        echo_notes([f"the result is unknown because of an unexpected error; {advice()}"])
        raise click.exceptions.Exit(EXIT_UNKNOWN) from error


def resume_hint(request: RunRequest) -> str:
    """Return how an interrupted run can be continued."""
    from auditor.fsck.results.run_folder import RunFolder, unfinished_runs

    output = request.output
    if not any(RunFolder(output, run).has_results for run in unfinished_runs(output)):
        return "no part was finished; the same command starts over (other options need --restart)"
    without = " without --restart" if request.is_restart else ""
    return f"the results so far are kept; the same command{without} continues the run"
