"""``python -m tests.java.judge URI``: BookKeeper's own client reads every copy of every entry.

Exit codes: 0 all copies exist, 1 copies are missing, 2 wrong usage (a wrong URI, no JDK), 3 could
not tell.
"""

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import click
import msgspec
from kazoo.client import KazooClient
from kazoo.exceptions import KazooException, NoNodeError
from kazoo.handlers.threading import KazooTimeoutError

from daemon.local import jars
from daemon.local.java import Java
from ledgers.codec.layout import MetadataUri, parse_layout
from ledgers.errors import BookmenderError, CorruptionError, SettingsError
from tests.java import messages
from tests.java.build import compiled_classes, find_compiler
from tests.java.messages import AnyRecord, Expected, Verdict
from tests.java.tool import JavaTool, Report

ZOOKEEPER_TIMEOUT_S = 5.0
log = logging.getLogger(__name__)
log.setLevel(logging.CRITICAL)  # kazoo gets this logger, because it logs each refused connection
CALLED_WRONGLY, COULD_NOT_TELL = 2, 3
LEDGERS_SHOWN_MAX = 20

VERDICTS = {
    Verdict.WHOLE: "all copies are there",
    Verdict.MISSING: "COPIES ARE MISSING",
    Verdict.UNKNOWN: "could not tell: some copies could not be read",
}


@click.command()
@click.argument("uri")
@click.option("--ledgers", metavar="ID,ID…", help="Judge these only, rather than all.")
@click.option(
    "--expect",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help='Compare contents too: a file of lines {"ledger": id, "last": entry id, "sha256": of all '
    "payloads}.",
)
@click.option("--json", "as_json", is_flag=True, help="Print records as JSON lines.")
@click.option("--bookkeeper", default=jars.BOOKKEEPER_DEFAULT, show_default=True, metavar="VERSION")
def main(
    uri: str, ledgers: str | None, expect: Path | None, as_json: bool, bookkeeper: str
) -> None:
    """Read every copy of every entry in the cluster at URI with BookKeeper's Java client.

    An example of a URI: zk+hierarchical://127.0.0.1:2181/ledgers
    """
    try:
        ledger_ids = None if ledgers is None else _ledger_ids(ledgers)
        expected = [] if expect is None else list(_expected(expect))
        java = Java.find()
        find_compiler(java)
        where = check_cluster(uri)
        _prepare(bookkeeper, java)
    except BookmenderError as error:
        _leave(error, CALLED_WRONGLY)
    show = _JsonLines() if as_json else _Text()
    try:
        with JavaTool(bookkeeper) as tool:
            report = tool.judge(
                java_uri(where), ledger_ids, expected=expected, on_record=show.record
            )
    except BookmenderError as error:
        _leave(error, COULD_NOT_TELL)
    show.report(report)
    raise SystemExit(report.verdict.exit_code)


def _leave(error: BookmenderError, exit_code: int) -> NoReturn:
    click.echo(f"judge: {error}", err=True)
    raise SystemExit(exit_code)


def _ledger_ids(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise SettingsError("--ledgers takes ids with commas between them", found=text) from None


def _expected(path: Path) -> Iterator[Expected]:
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            yield msgspec.json.decode(line, type=Expected)
        except msgspec.DecodeError as error:
            raise SettingsError(f"{path}, line {number}: {error}") from error


def java_uri(where: MetadataUri) -> str:
    """Return the URI for BookKeeper's own client, which knows neither quotes nor Pulsar's URIs."""
    return f"zk+null://{where.hosts.replace(',', ';')}{where.root}"


def check_cluster(uri: str) -> MetadataUri:
    """Return the parsed URI. Raise SettingsError unless it has a BookKeeper cluster's metadata.

    This comes before the Java client, which would wait long for a missing ZooKeeper, and would
    create a new layout at a wrong path.
    """
    where = MetadataUri.parse(uri)
    zookeeper = KazooClient(hosts=where.hosts, timeout=ZOOKEEPER_TIMEOUT_S, logger=log)
    try:
        zookeeper.start(timeout=ZOOKEEPER_TIMEOUT_S)
        if where.pulsar_root and zookeeper.exists(f"{where.pulsar_root}/LAYOUT"):
            raise SettingsError(f"it may also mean the cluster at {where.pulsar_root}", uri=uri)
        layout = parse_layout(zookeeper.get(f"{where.root}/LAYOUT")[0])
    except KazooTimeoutError as error:
        raise SettingsError("no ZooKeeper answers", hosts=where.hosts) from error
    except NoNodeError as error:
        raise SettingsError("no BookKeeper cluster has its metadata there", uri=uri) from error
    except (KazooException, CorruptionError) as error:
        raise SettingsError(f"its metadata cannot be read: {error}", uri=uri) from error
    finally:
        zookeeper.stop()
        zookeeper.close()
    if where.layout not in (None, layout):
        raise SettingsError(f"the cluster's layout is another one: {layout.name}", uri=uri)
    return where


def _prepare(bookkeeper: str, java: Java) -> None:
    if not jars.jars_folder(bookkeeper).exists():
        click.echo(f"Fetching BookKeeper {bookkeeper}, once: about 100 MB, a minute.", err=True)
        jars.fetch(bookkeeper)
    compiled_classes(bookkeeper, java)


class _JsonLines:
    """Prints each record as JSON."""

    def record(self, record: AnyRecord) -> None:
        click.echo(msgspec.json.encode(record))

    def report(self, report: Report) -> None:
        """Do nothing: each record was printed as it came."""


class _Text:
    """Prints progress, the ledgers that are not whole, sums, and the verdict last."""

    def __init__(self) -> None:
        self._start_s = time.monotonic()
        self._shown_count = 0

    def record(self, record: AnyRecord) -> None:
        match record:
            case messages.Progress():
                elapsed_s = time.monotonic() - self._start_s
                click.echo(
                    f"{elapsed_s:4.0f} s: {record.ledgers:,} of {record.ledgers_to_do:,} ledgers, "
                    f"{record.copies:,} copies"
                )
            case messages.LedgerVerdict() if record.verdict is not Verdict.WHOLE:
                self._show(describe_ledger(record))
            case messages.Comparison() if record.verdict is not Verdict.WHOLE:
                self._show(f"ledger {record.ledger}: {record.error}")
            case _:
                pass

    def report(self, report: Report) -> None:
        if self._shown_count > LEDGERS_SHOWN_MAX:
            click.echo(f"… and {self._shown_count - LEDGERS_SHOWN_MAX:,} more like these")
        for line in describe_summary(report.summary, elapsed_s=time.monotonic() - self._start_s):
            click.echo(line)

    def _show(self, line: str) -> None:
        self._shown_count += 1
        if self._shown_count <= LEDGERS_SHOWN_MAX:
            click.echo(line)


def describe_ledger(ledger: messages.LedgerVerdict) -> str:
    """Return one line about a ledger that is not whole."""
    parts = []
    if ledger.error is not None:
        parts.append(ledger.error)
    if ledger.copies is not None:
        parts.append(f"{ledger.good:,} of {ledger.copies:,} copies are good")
    parts += [f"{count:,} {problem}" for problem, count in ledger.problems.items()]
    if ledger.gone_bookies:
        parts.append(f"not registered: {', '.join(ledger.gone_bookies)}")
    for copy in ledger.examples[:1]:
        parts.append(f"e.g. entry {copy.entry} on {copy.bookie}")
    return f"ledger {ledger.ledger} ({ledger.verdict.value}): {'; '.join(parts)}"


def describe_summary(summary: messages.Summary, *, elapsed_s: float) -> Iterator[str]:
    """Yield the sums, and the verdict."""
    ledgers = summary.ledgers
    yield (
        f"{sum(ledgers.values()):,} ledgers in {elapsed_s:.1f} s: "
        f"{ledgers[Verdict.WHOLE]:,} whole, {ledgers[Verdict.MISSING]:,} with copies missing, "
        f"{ledgers[Verdict.UNKNOWN]:,} unknown"
    )
    yield f"{summary.copies:,} copies of {summary.entries:,} entries: {summary.good:,} good"
    if compared := sum(summary.contents.values()):
        yield f"{summary.contents[Verdict.WHOLE]:,} of {compared:,} contents are as expected"
    yield f"verdict: {VERDICTS[summary.verdict]}"


if __name__ == "__main__":
    main()
