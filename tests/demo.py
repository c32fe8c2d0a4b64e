"""What the demonstrations share: exit codes, lines with the time, logs that are kept."""

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from daemon.cli.main import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_WRONG_USE, signals_as_ctrl_c
from ledgers.errors import BookmenderError, SettingsError

Say = Callable[[str], None]


class SurpriseError(Exception):
    """A result is not as expected."""


def run_demo(name: str, run: Callable[[], None]) -> None:
    """Run a demonstration.

    Exits with 1 if something was not as expected, 2 if a program is missing, and as shells do after
    Ctrl-C and SIGTERM.
    """
    ended_by: list[int] = []
    try:
        with signals_as_ctrl_c(ended_by):
            run()
    except SettingsError as error:
        sys.exit(_complain(name, error, EXIT_WRONG_USE))
    except (BookmenderError, SurpriseError, AssertionError, TimeoutError, OSError) as error:
        sys.exit(_complain(name, error, EXIT_FAILED))
    except KeyboardInterrupt:
        print("interrupted; everything is stopped", file=sys.stderr)
        sys.exit(128 + ended_by[0] if ended_by else EXIT_INTERRUPTED)


def _complain(name: str, error: Exception, exit_code: int) -> int:
    print(f"{name}: {error or type(error).__name__}", file=sys.stderr)
    return exit_code


def teller() -> Say:
    """Return a function that prints a line with the time since this call."""
    began_s = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began_s:5.1f} s] {text}", flush=True)

    return say


@contextmanager
def logs_kept(folder: Path, output: Path, *more: str) -> Iterator[None]:
    """Copy the logs of all processes to the output if the demonstration fails. ``more``: patterns
    of other files."""
    try:
        yield
    except Exception:
        patterns = ("*.log", "**/logs/*.log", *more)
        for log in [log for pattern in patterns for log in folder.glob(pattern)]:
            target = output / "logs" / log.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(log, target)
        print(f"the logs are in {output / 'logs'}", file=sys.stderr)
        raise
