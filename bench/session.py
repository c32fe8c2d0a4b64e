"""What the commands of all benches share: records and failures, the report at the end, progress on
standard error, and the order in which contenders take turns."""

import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import click

from bench.records import FAILURE, Record, Records
from ledgers.errors import BookmenderError

T = TypeVar("T")
RESULTS = Path(__file__).with_name("results")

quick_option = click.option("--quick", is_flag=True, help="Small numbers, once; leaves no record.")
results_option = click.option(
    "--results",
    type=click.Path(file_okay=False, path_type=Path),
    help="The folder of the records and the report.  [default: bench/results]",
)
other_tree_option = click.option(
    "--other-tree",
    type=click.Path(exists=True, file_okay=False, resolve_path=True, path_type=Path),
    help="Another checkout with its own .venv, whose node takes turns with ours. Leaves no record"
    " without --results.",
)


class Session:
    """One run of a bench. A part that fails is recorded as a failure, and the others continue."""

    def __init__(self, records: Records) -> None:
        self.records = records
        self._began_s = time.monotonic()

    def say(self, text: str) -> None:
        click.echo(f"[{time.monotonic() - self._began_s:6.0f} s] {text}", err=True)

    def add(self, record: Record) -> None:
        self.records.add(record)
        labels = ", ".join(str(each) for each in record.labels.values())
        figures = ", ".join(f"{name} {value:,.5g}" for name, value in record.values.items())
        self.say(f"{record.name} {labels}: {figures or record.text}")

    @contextmanager
    def attempt(self, title: str) -> Iterator[None]:
        """Record a failure of the body under this title, and forget an earlier one."""
        self.records.forget(lambda record: record == failure(title, record.text))
        self.say(f"{title}: starting")
        try:
            yield
        except (BookmenderError, OSError) as error:
            self.add(failure(title, str(error)))

    @property
    def failed(self) -> set[str | int]:
        """The titles of what failed."""
        return set(self.records.labels(FAILURE, "title"))


def failure(title: str, why: str) -> Record:
    return Record(name=FAILURE, labels={"title": title}, text=why)


@contextmanager
def bench_session(
    name: str, report: Callable[[Records], str], *, results: Path | None, is_kept: bool
) -> Iterator[Session]:
    """Yield the session of a command, and write and print its report at the end, also after Ctrl-C.

    ``is_kept``: without ``results``, use ``bench/results`` instead of a temporary folder.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # clean up as for Ctrl-C
    with tempfile.TemporaryDirectory(prefix="bench-results-") as temporary:
        folder = results or (RESULTS if is_kept else Path(temporary))
        folder.mkdir(parents=True, exist_ok=True)
        session = Session(Records(folder / f"{name}.jsonl"))
        try:
            yield session
        except BookmenderError as error:
            raise click.ClickException(str(error)) from error
        finally:
            text = report(session.records)
            (folder / f"{name}.md").write_text(text)
            click.echo(text)


def chosen(options: Mapping[str, T], names: str) -> list[T]:
    """Return the options named in a comma-separated list. Raises click.BadParameter for an unknown
    name."""
    wanted = names.split(",")
    if unknown := [name for name in wanted if name not in options]:
        raise click.BadParameter(f"{', '.join(unknown)}: there are {', '.join(options)}")
    return [option for name, option in options.items() if name in wanted]


def in_turn(contenders: Sequence[T], repeats: int) -> Iterator[tuple[int, T]]:
    """Yield each repeat, counted from 1, with each contender. Every other repeat is in reverse
    order, so that no contender always meets the fresher servers."""
    for repeat in range(1, repeats + 1):
        for contender in contenders if repeat % 2 else reversed(contenders):
            yield repeat, contender
