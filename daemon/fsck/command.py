"""``bookmender fsck``.

What ``bookmender fsck`` is asked for: kinds of options that its commands share, and what becomes
of them.
"""

import asyncio
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from auditor.fsck.levels import FsckOptions, Level, SessionTimeouts
from auditor.fsck.results.summary import Summary
from auditor.fsck.verdicts import Grade
from daemon.admin_session import log_errors_only
from daemon.cli.main import EXIT_FAILED, EXIT_UNKNOWN, LedgerId, config_option, note_output
from daemon.cli.option_types import Duration, Limit
from daemon.cli.progress import ProgressLine, echo_notes
from daemon.fsck.running import (
    SPARK_LOG,
    Marked,
    Wanted,
    check_spark,
    failing_as_unknown,
    holding_output,
    look_up_places,
    need_modules,
    preview,
    publish,
    read_racks,
    run,
    tell_daemon,
    what_stays,
)
from daemon.settings import Settings, load_settings
from ledgers.codec.layout import MetadataUri
from ledgers.errors import (
    BookmenderError,
    SessionLostError,
    SettingsError,
    UnavailableError,
)

if TYPE_CHECKING:
    from auditor.fsck.publishing import Fault, Foreseen
    from auditor.fsck.results.reading import PastVerdict, Results

URI_VARIABLE = "BOOKMENDER_METADATA_SERVICE_URI"


class Folder(click.Path):
    """As an absolute path; "" is a variable that was never set, and not the folder that one happens
    to be in."""

    def __init__(self) -> None:
        super().__init__(file_okay=False, resolve_path=True, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("it is empty: name a folder, . for this one", param, ctx)
        return super().convert(value, param, ctx)


class Share(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.5 on only
    """``5%``, ``0.5%``: a share above 0, up to 1."""

    name = "percent"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        if isinstance(value, float):
            return value
        found = re.fullmatch(r"([0-9]{1,3}(?:\.[0-9]{1,6})?)%", value)
        share = float(found[1]) / 100 if found else 0.0
        if not 0 < share <= 1:
            self.fail(f"{value!r} is no share, as in 5% or 0.5%", param, ctx)
        return share


class SparkSetting(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.5 on only
    """``spark.executor.memory=2g``."""

    name = "key=value"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        key, equals, setting = str(value).partition("=")
        if not equals or not key.startswith("spark."):
            self.fail(
                f"{value!r} is no setting of Spark's, as in spark.executor.memory=2g", param, ctx
            )
        return key, setting


class SparkMaster(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.5 on only
    """``local[4]``, ``spark://host:7077``, ``yarn``, or another cluster manager's ``scheme://…``:
    what Spark would not start for it says in words of its own, and as if something had failed."""

    name = "master"
    _masters = re.compile(
        r"local(\[(\*|[1-9][0-9]*)(, *[0-9]+)?\])?|local-cluster\[.+\]|yarn"
        r"|spark://[^/,\s]+:[0-9]+(,[^/,\s]+:[0-9]+)*|(?!spark:|local:)[a-z][a-z0-9+.-]*://\S+"
    )

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value == "":  # as of a script's variable that is not set
            self.fail("it is empty; left out, it is local[*]", param, ctx)
        if not self._masters.fullmatch(value):
            kinds = "local[4], local[*], spark://host:7077, yarn, k8s://https://host:443"
            self.fail(f"{value!r} is no master that Spark knows, as are {kinds}", param, ctx)
        return str(value)


# Not those of ``daemon.cli.main``: --output says where results go.
format_option = click.option(
    "-o",
    "output_format",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    is_eager=True,
    callback=note_output,
    help="For people, or for programs.",
)
json_option = click.option(
    "--json",
    "output_format",
    flag_value="json",
    is_eager=True,
    callback=note_output,
    help="The same as -o json.",
)
uri_option = click.option(
    "--metadata-service-uri",
    "uri",
    metavar="URI",
    help="As in zk+hierarchical://zk1:2181;zk2:2181/ledgers, in place of the settings'.",
)
mark_option = click.option(
    "--mark", is_flag=True, help="Mark what can be mended. Without it: say what would be marked."
)


def settings_for(
    uri: str | None, config: Path | None, environment: Mapping[str, str] = os.environ
) -> Settings:
    """Those of the other commands; ``uri`` wins. Raises SettingsError."""
    given = {}
    if uri:
        given[URI_VARIABLE] = uri
        try:
            MetadataUri.parse(uri)
        except SettingsError as error:
            raise SettingsError(f"--metadata-service-uri: {error}") from error
    return load_settings(config, {**environment, **given})


def options_for(
    settings: Settings,
    *,
    level: Level,
    share: float | None,
    entry_lists: bool,
    reads_per_s: int | None,
    bytes_per_s: int | None,
    reads_in_flight: int | None,
) -> FsckOptions:
    """Raises SettingsError."""
    options = FsckOptions(
        metadata_service_uri=settings.metadata_service_uri,
        level=level,
        entry_lists=entry_lists,
        reads_per_s=reads_per_s or 0,
        bytes_per_s=bytes_per_s or 0,
        idle_open_after_s=settings.checks.counts_as_idle_after_s,
        timeouts=SessionTimeouts(
            session_s=settings.zookeeper.session_timeout_s,
            connect_s=settings.zookeeper.connect_timeout_s,
        ),
        default_password=settings.replication.default_password,
        default_digest_type=settings.replication.default_digest_type,
    )
    if share is not None:
        options = replace(options, sample_share=share)
    if reads_in_flight is not None:
        options = replace(options, reads_in_flight_per_bookie=reads_in_flight)
    return options


def level_for(level: str | None, share: float | None) -> Level:
    chosen = Level(level) if level else Level.ENDS if share is None else Level.SAMPLE
    if share is not None and chosen is not Level.SAMPLE:
        raise click.UsageError(f"--sample goes with level sample, not {chosen.value}")
    return chosen


NO_RESULTS = "are these the results of a run, whole?"


@click.group()
def fsck() -> None:
    """Proof, copy by copy, that the data is there. Runs on Spark.

    \b
      bookmender fsck run --level full --output DIR    look at every copy of every entry
      bookmender fsck report DIR                       its report, anew
      bookmender fsck mark DIR --mark                  have the daemon mend what it found
      bookmender fsck diff DIR                         the last two runs in DIR
      bookmender fsck show DIR LEDGER                  what was found of one ledger
    """


@fsck.command("run")
@click.option(
    "--output",
    "output",
    metavar="DIR",
    required=True,
    type=Folder(),
    help="Where results are kept, of many runs. One run at a time.",
)
@click.option(
    "--level",
    type=click.Choice([level.value for level in Level]),
    help="How closely it looks.  [default: ends; sample with --sample]",
)
@click.option(
    "--sample", "share", type=Share(), help="Of the entries between, as in 5%.  [default: 1%]"
)
@click.option(
    "--master",
    type=SparkMaster(),
    help="Spark's: local[4], spark://host:7077, yarn ….  [default: spark-submit's, else local[*]]",
)
@click.option(
    "--spark-conf", type=SparkSetting(), multiple=True, help="spark.executor.memory=2g, and so on."
)
@click.option(
    "--start-within",
    "start_timeout_s",
    type=Duration(),
    default="5m",
    show_default=True,
    help="How long Spark may take to start. With spark-submit it has started.",
)
@click.option("--entry-lists", is_flag=True, help="Ask bookies for lists of their entries, too.")
@click.option("--for", "time_budget_s", type=Duration(), help="Stop after so long, as in 2h.")
@click.option(
    "--skip-checked-within",
    "checked_within_s",
    type=Duration(),
    help="Skip closed, unchanged ledgers that a run of this level found without any fault, e.g. 7d ago.",
)
@click.option(
    "--reads-per-s", type=Limit("entries_per_s"), help="Entries, of all executors together."
)
@click.option("--bytes-per-s", type=Limit("bytes_per_s"), help="Likewise, as in 50M.")
@click.option(
    "--reads-in-flight",
    type=Limit("reads_in_flight_per_bookie"),
    help="At one bookie, of one executor; less where many read.  [default: 64]",
)
@click.option(
    "--anew", is_flag=True, help="Give up a run that was killed, instead of going on with it."
)
@mark_option
@uri_option
@config_option
@format_option
@json_option
def run_command(
    output: Path,
    level: str | None,
    share: float | None,
    master: str | None,
    spark_conf: tuple[tuple[str, str], ...],
    start_timeout_s: int,
    entry_lists: bool,
    time_budget_s: int | None,
    checked_within_s: int | None,
    reads_per_s: int | None,
    bytes_per_s: int | None,
    reads_in_flight: int | None,
    anew: bool,
    mark: bool,
    uri: str | None,
    config: Path | None,
    output_format: str,
) -> None:
    """Look at every ledger. Reads alone; writes nothing but its results, unless --mark is given.

    \b
    Levels, each sees what the one before sees:
      metadata   metadata that cannot be read, bookies that are gone, placement; asks no bookie
      ends       the first and the last entry of each copy of each fragment
      sample     a share of the entries between, the same of each copy
      full       every entry of every copy, and the copies compared with each other

    A run that was killed goes on where it was when the same command is given again. What seems
    wrong is looked at twice before it is told.

    Exits 0 when all ledgers are whole (or legally short of a copy), 1 when something is wrong, 2
    when it was called wrongly, 3 when nothing is known to be wrong but of some ledgers nobody
    knows.
    """
    chosen = level_for(level, share)
    settings = settings_for(uri, config)
    log_errors_only(settings)
    wanted = Wanted(
        options=options_for(
            settings,
            level=chosen,
            share=share,
            entry_lists=entry_lists,
            reads_per_s=reads_per_s,
            bytes_per_s=bytes_per_s,
            reads_in_flight=reads_in_flight,
        ),
        output=output,
        master=master,
        spark_settings=dict(spark_conf),
        start_timeout_s=start_timeout_s,
        time_budget_s=time_budget_s or 0,
        checked_within_s=checked_within_s or 0,
        is_anew=anew,
    )
    launch = check_spark(wanted)
    if launch is not None and launch.ignored:
        echo_notes([f"not used for a run on this machine: {', '.join(launch.ignored)}"])
    with holding_output(output):
        with failing_as_unknown(lambda: what_stays(wanted)):
            summary = _run(settings, wanted)
        with failing_as_unknown(
            lambda: f"the run is over: bookmender fsck report {output} tells of it"
        ):
            asyncio.run(tell_daemon(settings, summary))
            record, lines = _left(settings, output, summary, is_marking=mark)
    click.echo(json.dumps(record, indent=2) if output_format == "json" else "\n".join(lines))
    sys.exit(summary.exit_code)


def _run(settings: Settings, wanted: Wanted) -> Summary:
    from daemon.fsck.texts import showing_progress

    places = asyncio.run(look_up_places(settings))
    try:
        with showing_progress() as on_progress:
            return run(wanted, places, on_progress)
    except (UnavailableError, SessionLostError, OSError):
        log = wanted.output / SPARK_LOG
        said = f"; what Spark said is in {log}" if log.exists() else ""
        echo_notes([f"the run broke off; {what_stays(wanted)}{said}"])
        raise


def _left(
    settings: Settings, output: Path, summary: Summary, *, is_marking: bool
) -> tuple[dict[str, Any], list[str]]:
    """The report, the marks; and all of it told, for programs and for people."""
    from auditor.fsck.results.reading import Results
    from auditor.fsck.results.report import write_report
    from daemon.fsck.texts import faults_lines, faults_record, summary_lines

    results = Results.open(output, summary.run)
    report = write_report(results, read_racks(output))
    faults = _faults(results)
    came_of_it: Marked | Foreseen | None = None
    try:
        came_of_it = _mark(settings, results, faults, is_marking=is_marking)
    except BookmenderError as error:  # what was found is to be told all the same
        failed = "not marked" if is_marking else "what changed since it was looked at is not known"
        echo_notes([f"{failed}: {error}"])
    record = {
        **summary.to_record(),
        "output": str(output),
        "report": str(report),
        "marks": faults_record(faults, came_of_it),
    }
    lines = [*summary_lines(summary), "", *faults_lines(faults, came_of_it), f"report: {report}"]
    return record, lines


def _faults(results: "Results") -> "list[Fault]":
    from auditor.fsck.publishing import faults_of

    with failing_as_unknown(lambda: NO_RESULTS):
        return faults_of(results.wrong())


def _mark(
    settings: Settings, results: "Results", faults: "Sequence[Fault]", *, is_marking: bool
) -> "Marked | Foreseen":
    """What was marked, or would be now. Where there is nothing to be nobody asks the cluster."""
    from auditor.fsck.publishing import Foreseen

    if not faults:
        return Foreseen()
    line = ProgressLine("ledger")
    try:
        if is_marking:
            return asyncio.run(
                publish(settings, results.folder, results.summary.run, faults, line.show)
            )
        return asyncio.run(preview(settings, results.folder, faults, line.show))
    finally:
        line.close()


@fsck.command("mark")
@click.argument("results", metavar="DIR[@RUN]")
@mark_option
@uri_option
@config_option
@format_option
@json_option
def mark_command(
    results: str, mark: bool, uri: str | None, config: Path | None, output_format: str
) -> None:
    """Mark what a run found missing or bad, so that the daemon mends it. Without --mark: say what
    would be.

    A ledger whose metadata was written since, or that is gone, is left out. What is marked already
    keeps what it says.
    """
    settings = settings_for(uri, config)
    log_errors_only(settings)
    found = _results(results)
    from daemon.fsck.texts import faults_lines, faults_record

    faults = _faults(found)
    came_of_it = _mark(settings, found, faults, is_marking=mark)
    if output_format == "json":
        click.echo(json.dumps(faults_record(faults, came_of_it), indent=2))
    else:
        click.echo("\n".join(faults_lines(faults, came_of_it)))


@fsck.command("report")
@click.argument("results", metavar="DIR[@RUN]")
def report_command(results: str) -> None:
    """Write DIR/report.html anew, of the last run or of another one; says where it is."""
    found = _results(results)
    from auditor.fsck.results.report import write_report

    with failing_as_unknown(lambda: NO_RESULTS):
        click.echo(write_report(found, read_racks(found.folder)))


@fsck.command("show")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.argument("ledger_id", metavar="LEDGER", type=LedgerId())
@format_option
@json_option
def show_command(folder: Path, ledger_id: int, output_format: str) -> None:
    """What the last run that looked at a ledger said of it, with the evidence; runs since may have
    skipped it.

    Besides, what earlier runs said that looked more closely. Exits 1 when it is wrong by any of
    these, 3 when nobody knows, or no run in DIR looked at it, else 0.
    """
    need_modules("pyarrow")
    from auditor.fsck.results.reading import past_verdicts
    from daemon.fsck.texts import past_lines, past_record

    with failing_as_unknown(lambda: NO_RESULTS):
        past = past_verdicts(folder, ledger_id)
    if output_format == "json":
        click.echo(json.dumps(past_record(ledger_id, past), indent=2))
    elif past:
        click.echo("\n".join(past_lines(past)))
    else:
        echo_notes([f"{folder}: no run whose rows are there has looked at ledger {ledger_id}"])
    sys.exit(_exit_code(past))


def _exit_code(past: "Sequence[PastVerdict]") -> int:
    if any(each.verdict.is_wrong for each in past):
        return EXIT_FAILED
    is_known = past and past[0].verdict.grade is not Grade.UNKNOWN
    return 0 if is_known else EXIT_UNKNOWN


@fsck.command("diff")
@click.argument("before", metavar="DIR[@RUN]")
@click.argument("after", metavar="[DIR[@RUN]]", required=False)
@format_option
@json_option
def diff_command(before: str, after: str | None, output_format: str) -> None:
    """Ledgers of which two runs say something else, that are new, or gone.

    Of one folder alone: its last two runs. Exits 1 when something is worse than it was, 2 where
    there are no such results, 3 when they cannot be read, else 0.
    """
    need_modules("pyarrow")
    from auditor.fsck.results.cluster import check_same_cluster
    from auditor.fsck.results.reading import Results, compare
    from daemon.fsck.texts import changes_lines, changes_record

    with failing_as_unknown(lambda: NO_RESULTS):
        if after is None:
            pair = Results.last_two(Path(before))
        else:
            pair = (Results.named(before), Results.named(after))
            check_same_cluster(pair[0].folder, pair[1].folder)
        changes = compare(*pair)
    if output_format == "json":
        runs = {"before": pair[0].summary.run, "after": pair[1].summary.run}
        click.echo(json.dumps({**runs, **changes_record(changes)}, indent=2))
    else:
        echo_notes([f"run {pair[0].summary.run}, then run {pair[1].summary.run}"])
        click.echo("\n".join(changes_lines(changes)))
    sys.exit(EXIT_FAILED if changes.has_worsened else 0)


def _results(name: str) -> "Results":
    """Raises SettingsError, UnavailableError."""
    need_modules("pyarrow")
    from auditor.fsck.results.reading import Results

    with failing_as_unknown(lambda: NO_RESULTS):
        return Results.named(name)
