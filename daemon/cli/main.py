"""The command line ``bookmender``. A command parses its arguments, calls one function and prints.

Exit codes: 0 healthy; 1 something was found or failed; 2 wrong usage; 3 unknown. As in shells: 130
after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP, 141 if the reader of the output closed the pipe.
"""

import importlib
import io
import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import click

from daemon.cli.progress import printable
from ledgers.errors import (
    BookmenderError,
    LockLostError,
    SessionLostError,
    SettingsError,
    UnauthorizedError,
    UnavailableError,
)

EXIT_FAILED, EXIT_WRONG_USE, EXIT_UNKNOWN = 1, 2, 3
EXIT_INTERRUPTED, EXIT_NO_READER = 130, 141
"""128 plus the number of SIGINT and of SIGPIPE."""


class LazyGroup(click.Group):
    """Imports the module of a command only when the command runs, so that ``--help`` stays fast."""

    modules: ClassVar[dict[str, str]] = {
        "daemon": "daemon.cli.daemon:daemon",
        "status": "daemon.status.command:status",
        "health": "daemon.status.health_command:health",
        "observe": "daemon.observe.command:observe",
        "queue": "daemon.cli.queue:queue",
        "plan": "daemon.cli.plan:plan",
        "ledger": "daemon.cli.ledger:ledger",
        "bookie": "daemon.cli.bookie:bookie",
        "repair": "daemon.cli.repair:repair",
        "limits": "daemon.cli.limits:limits",
        "hold": "daemon.cli.hold:hold",
        "check": "daemon.cli.check:check",
        "fsck": "daemon.fsck.command:fsck",
        "disable": "daemon.cli.switch:disable",
        "enable": "daemon.cli.switch:enable",
        "local": "daemon.local.commands:local",
        "demo": "daemon.demo.command:demo",
    }

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.modules)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.modules:
            return None
        module, _, attribute = self.modules[cmd_name].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with _ending_with_the_reader():  # --help prints here
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        with _ending_with_the_reader(), _telling_programs(ctx):
            return super().invoke(ctx)


@contextmanager
def _telling_programs(ctx: click.Context) -> Iterator[None]:
    """With ``-o json``, print an error as a JSON object on standard output. Standard error gets the
    text as usual."""
    try:
        yield
    except (BookmenderError, click.ClickException) as error:
        if ctx.meta.get(_OUTPUT) == "json":
            if isinstance(error, click.ClickException):
                message, code = error.format_message(), error.exit_code
            else:
                message, code = str(error), _exit_code(error)
            click.echo(json.dumps({"error": message, "exit_code": code}, indent=2))
        raise


@contextmanager
def _ending_with_the_reader() -> Iterator[None]:
    """Exit with 141 if the reader closed the pipe, as in ``bookmender queue list | head -1``. Click
    would exit with 1."""
    try:
        yield
    except BrokenPipeError as error:
        _drop_output()
        raise click.exceptions.Exit(EXIT_NO_READER) from error


@click.group(cls=LazyGroup)
@click.version_option(package_name="bookmender")
def cli() -> None:
    """Keeps Apache BookKeeper clusters whole.

    \b
    Try it on this machine:
      bookmender local up             a real cluster on loopback
      bookmender daemon               repairs what is lost, until Ctrl-C
      bookmender status               what is at risk, and why

    Every command that talks to a cluster takes its address from -c FILE or from
    BOOKMENDER_METADATA_SERVICE_URI (zk+hierarchical://127.0.0.1:2181/ledgers).
    """


def main() -> None:
    """Run the command line. Turns a BookmenderError into one line on standard error and an exit
    code."""
    ended_by: list[int] = []
    if isinstance(
        sys.stdout, io.TextIOWrapper
    ):  # characters that the terminal cannot show are escaped
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with _ended_as_by_ctrl_c(ended_by):
            code = cli(standalone_mode=False)
        sys.exit(
            code if isinstance(code, int) else 0
        )  # the exit code of the command, if it returned one
    except click.exceptions.Abort:
        sys.exit(128 + ended_by[0] if ended_by else EXIT_INTERRUPTED)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except BookmenderError as error:
        # One line, unless the error quotes the end of a server log.
        lines = f"bookmender: {error}".expandtabs(4).split("\n")
        click.echo("\n".join(map(printable, lines)), err=True)  # the text may quote a znode
        sys.exit(_exit_code(error))
    except OSError as error:  # most likely a full disk
        where = f"{error.filename}: " if error.filename else ""
        click.echo(f"bookmender: {where}{error.strerror or error}", err=True)
        _drop_output()
        sys.exit(EXIT_UNKNOWN)


@contextmanager
def _ended_as_by_ctrl_c(ended_by: list[int]) -> Iterator[None]:
    """Treat SIGTERM and SIGHUP like Ctrl-C, so that locks are released and the command reports how
    far it came.

    ``ended_by``: receives the number of the signal. A signal that is already ignored (nohup) stays
    ignored.
    """

    def end(number: int, frame: FrameType | None) -> None:
        ended_by.append(number)
        interrupt = signal.getsignal(signal.SIGINT)  # of Spark, of a node, or of asyncio
        if not callable(interrupt):  # ignored: a shell does so for background commands
            interrupt = signal.default_int_handler
        interrupt(signal.SIGINT, frame)

    numbers = (signal.SIGTERM, signal.SIGHUP)
    taken = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def _drop_output() -> None:
    """Discard buffered output. The interpreter would otherwise fail again when it flushes at
    exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _exit_code(error: BookmenderError) -> int:
    match error:
        case SettingsError():
            return EXIT_WRONG_USE
        case UnavailableError() | SessionLostError() | LockLostError() | UnauthorizedError():
            return EXIT_UNKNOWN
        case _:
            return EXIT_FAILED


config_option = click.option(
    "-c",
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Settings in TOML. Without it: the BOOKMENDER_… environment variables alone.",
)
_OUTPUT = "bookmender.output"
"""In a context's ``meta``: text or json."""


def note_output(ctx: click.Context, param: click.Parameter, value: str) -> str:
    """For options that say what the output is: errors are to be of the same kind."""
    if value == "json":
        ctx.meta[_OUTPUT] = value
    return value


output_option = click.option(
    "-o",
    "--output",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    is_eager=True,  # whatever is wrong with other arguments is told in that form, too
    callback=note_output,
    help="For people, or for programs: then errors, too, are an object, with error and exit_code.",
)
json_option = click.option(
    "--json",
    "output",
    flag_value="json",
    is_eager=True,
    callback=note_output,
    help="The same as -o json.",
)


class LedgerId(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.5 on only
    """A ledger's id, in plain digits: Python itself would read ``1_0`` as ten."""

    name = "ledger"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        if not re.fullmatch("[0-9]+", value):
            self.fail(f"{value!r} is no ledger's id: digits alone, as in 4711", param, ctx)
        if len(value) > len(str(LEDGER_ID_MAX)) or int(value) > LEDGER_ID_MAX:
            shown = value if len(value) <= ID_SHOWN_MAX else f"{value[:ID_SHOWN_MAX]}…"
            self.fail(f"{shown} is no ledger's id: they go from 0 to {LEDGER_ID_MAX}", param, ctx)
        return int(value)


LEDGER_ID_MAX = 2**63 - 1
ID_SHOWN_MAX = 40
"""Digits of a number that is far too large."""
