"""How a run of fsck that does not come to its end is told."""

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

from daemon.cli import EXIT_UNKNOWN
from daemon.fsck.running import Wanted
from daemon.operating.progress import tell
from ledgers.errors import (
    BookmenderError,
    SessionLostError,
    SettingsError,
    UnavailableError,
)

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
        tell([f"interrupted; {advice()}"])
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
        tell([f"could not tell; {advice()}"])
        raise click.exceptions.Exit(EXIT_UNKNOWN) from error


def what_stays(wanted: Wanted) -> str:
    """Of a run that did not come to its end."""
    from auditor.fsck.results.run_folder import RunFolder, unfinished_runs

    output = wanted.output
    if not any(RunFolder(output, run).has_results for run in unfinished_runs(output)):
        return BEGINS_AGAIN
    return GOES_ON.format(", without --anew," if wanted.is_anew else "")
