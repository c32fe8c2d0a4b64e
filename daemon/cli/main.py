"""The command line ``bookmender``. A command parses its arguments, calls one function and prints.

Exit codes: 0 healthy; 1 something was found or failed; 2 wrong usage; 3 unknown; 4 another process
follows the feed under the same name. As in shells: 130 after Ctrl-C, 143 after SIGTERM, 129 after
SIGHUP, 141 if the reader of the output closed the pipe.
"""

import difflib
import importlib
import io
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import click

from daemon.cli.names import GONE, RENAMED
from daemon.cli.paths import ReadableFile
from daemon.operations.errors import UnknownBookieError
from daemon.words import printable
from ledgers.errors import (
    BookmenderError,
    ClientFencedError,
    LockLostError,
    SessionLostError,
    SettingsError,
    UnauthorizedError,
    UnavailableError,
    UnsupportedError,
)

F = TypeVar("F", bound=Callable[..., Any])

EXIT_FAILED, EXIT_WRONG_USE, EXIT_UNKNOWN, EXIT_FENCED = 1, 2, 3, 4
EXIT_INTERRUPTED, EXIT_NO_READER = 130, 141
"""128 plus the number of SIGINT and of SIGPIPE."""


NEAR_MAX = 3
"""Number of commands that an error suggests."""


_CONFIG = "bookmender.config"
"""Key of the settings file in ``meta`` of a click context."""


def _note_config(ctx: click.Context, param: click.Parameter, given: Path | None) -> Path | None:
    """Remember the file, and return it or that of an option before the command."""
    if given is not None:
        ctx.meta[_CONFIG] = given
    found: Path | None = ctx.meta.get(_CONFIG)
    return found


config_option = click.option(
    "-c",
    "--config",
    type=ReadableFile(),
    callback=_note_config,
    help="TOML settings. The environment overrides them.",
)


class CommandGroup(click.Group):
    """A group that answers unknown commands: with what replaces them, or with similar ones.

    ``lazy``: commands whose module is imported only when they run. For each name, where the command
    is (``module:attribute``), and its line in ``--help``, which so needs no import. A command
    without a line is hidden. The option ``-c`` may also come before the command.
    """

    def __init__(
        self, *args: Any, lazy: Mapping[str, tuple[str, str]] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.lazy = lazy or {}
        if all(param.name != "config" for param in self.params):
            shape: dict[str, Any] = {"type": ReadableFile(), "expose_value": False, "hidden": True}
            self.params.append(click.Option(["-c", "--config"], callback=_note_config, **shape))

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.commands, *self.lazy]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.lazy:
            return super().get_command(ctx, cmd_name)
        where, line = self.lazy[cmd_name]
        module, _, attribute = where.partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        command.hidden = not line
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        is_option = name.startswith("-")
        if not (is_option or ctx.resilient_parsing) and self.get_command(ctx, name) is None:
            fail_if_gone(ctx, name)
            near = self._near(ctx, name)
            meant = f" Did you mean {' or '.join(near)}?" if near else ""
            ctx.fail(f"No such command '{name}'.{meant}")
        return super().resolve_command(ctx, args)

    def _near(self, ctx: click.Context, name: str) -> list[str]:
        """Return commands that may be meant: in a group below with this name, or here and
        similar."""
        names = self.list_commands(ctx)
        below = [
            f"{each} {name}"
            for each in names
            if isinstance(command := self.get_command(ctx, each), click.Group)
            and name in command.list_commands(ctx)
        ]
        near = below or difflib.get_close_matches(name, names)
        return [f"{ctx.command_path} {each}" for each in near[:NEAR_MAX]]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [
            (name, command.get_short_help_str())
            for name, command in self.commands.items()
            if not command.hidden
        ]
        rows += [(name, line) for name, (_, line) in self.lazy.items() if line]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def fail_if_gone(ctx: click.Context, name: str) -> None:
    """Fail with what to use instead if the command or option ``name`` of this context is gone."""
    path = " ".join([*ctx.command_path.removeprefix(ctx.find_root().command_path).split(), name])
    if path in GONE:
        ctx.fail(f"There is no bookmender {path}. Use: {GONE[path]}")


class RootGroup(CommandGroup):
    """The group of all commands.

    It accepts the names of the last release. It exits without an error message if the reader of the
    output closes the pipe. If JSON output was requested, it prints errors as JSON.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args[:1] == ["help"]:
            args = [*args[1:], "--help"]
        if args == ["version"]:
            args = ["--version"]
        for old in (" ".join(args[:1]), " ".join(args[:2])):
            if new := RENAMED.get(old):
                args = [*new.split(), *args[len(old.split()) :]]
                if sys.stderr.isatty() and not ctx.resilient_parsing:  # scripts get no new output
                    click.echo(f"bookmender {old} is now: bookmender {new}", err=True)
                break
        return super().parse_args(ctx, args)

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with _exit_without_reader():  # --help prints here
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        with _exit_without_reader(), _errors_as_json(ctx):
            try:
                return super().invoke(ctx)
            except click.NoSuchOption as error:
                if error.ctx is not None:
                    fail_if_gone(error.ctx, error.option_name)
                raise


COMMANDS: dict[str, tuple[str, str]] = {
    "daemon": ("daemon.cli.daemon:daemon", "Run a node until SIGTERM or Ctrl-C."),
    "status": ("daemon.cli.status:status", "Show the cluster's health and what to do."),
    "history": ("daemon.cli.history:history", "Show what happened, when, and who did it."),
    "queue": ("daemon.cli.queue:queue", "Show the marked ledgers and why they wait."),
    "plan": ("daemon.cli.plan:plan", "Show what repairs would copy."),
    "ledger": ("daemon.cli.ledger:ledger", "Show, close or restore single ledgers."),
    "bookie": ("daemon.cli.bookie:bookie", "List bookies, and take them out of service."),
    "repair": ("daemon.cli.repair:repair", "Check and repair ledgers in this process."),
    "limits": ("daemon.cli.orders:limits", "Show or set the limits of all nodes."),
    "hold": ("daemon.cli.orders:hold", "Show, begin or end the safety hold."),
    "check": ("daemon.cli.check:check", "Show, run or pause the periodic checks."),
    "fsck": ("daemon.cli.fsck:fsck", "Check every copy of every ledger, on Spark."),
    "disable": ("daemon.cli.orders:disable", "Disable auto-recovery in the whole cluster."),
    "enable": ("daemon.cli.orders:enable", "Enable auto-recovery again."),
    "recovery-delay": (
        "daemon.cli.orders:recovery_delay",
        "Show or set how long a bookie may be absent.",
    ),
    "feed": ("daemon.cli.feed:feed", "Follow every change of ledger metadata."),
    "notify": ("daemon.cli.notify:notify", "Tell programs that their ledgers changed."),
    "archive": ("daemon.cli.archive:archive", "Archive all metadata, and restore it."),
    "shell": ("daemon.cli.shell:shell", ""),
    "doctor": ("daemon.cli.doctor:doctor", "Check host, ZooKeeper, bookies and settings."),
    "config": ("daemon.cli.config:config", "Show, check or import settings."),
    "completion": ("daemon.cli.completion:completion", ""),
    "local": ("daemon.cli.local:local", "Run a BookKeeper cluster on this machine."),
}
"""The commands in the order of ``bookmender --help``."""


@click.group(cls=RootGroup, lazy=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="bookmender")
def cli() -> None:
    """Auto-recovery for Apache BookKeeper: finds lost copies of ledgers and restores them.

    \b
    Quick start on this machine (Java 17 or later):
      bookmender local up        start ZooKeeper and five bookies
      bookmender local write     write some ledgers
      bookmender daemon          run a node until Ctrl-C
      bookmender local kill 2    crash a bookie (in another terminal)
      bookmender status          watch the repair
    \b
    For another cluster write its address into a settings file: -c FILE,
    ~/.config/bookmender/bookmender.toml or /etc/bookmender/bookmender.toml
    Exit codes: 0 healthy or done, 1 found something, 2 wrong usage, 3 unknown.
    """


@contextmanager
def _errors_as_json(ctx: click.Context) -> Iterator[None]:
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
def _exit_without_reader() -> Iterator[None]:
    """Exit with 141 if the reader closed the pipe, as in ``bookmender queue | head -1``. Click
    would exit with 1."""
    try:
        yield
    except BrokenPipeError as error:
        _drop_output()
        raise click.exceptions.Exit(EXIT_NO_READER) from error


def main() -> None:
    """Run the command line. Turns a BookmenderError into one line on standard error and an exit
    code."""
    ended_by: list[int] = []
    # Escape characters that the terminal cannot show.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with signals_as_ctrl_c(ended_by):
            code = cli(standalone_mode=False)
        # The command may return its exit code.
        sys.exit(code if isinstance(code, int) else 0)
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
def signals_as_ctrl_c(ended_by: list[int]) -> Iterator[None]:
    """Treat SIGTERM and SIGHUP like Ctrl-C, so that locks are released and the command reports how
    far it came.

    ``ended_by``: receives the number of the signal. A signal that is already ignored (nohup) stays
    ignored.
    """

    def end(number: int, frame: FrameType | None) -> None:
        ended_by.append(number)
        interrupt = signal.getsignal(signal.SIGINT)  # may belong to Spark, a node or asyncio
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
        case SettingsError() | UnknownBookieError():
            return EXIT_WRONG_USE
        case UnavailableError() | SessionLostError() | LockLostError():
            return EXIT_UNKNOWN
        case UnauthorizedError() | UnsupportedError():
            return EXIT_UNKNOWN
        case ClientFencedError():
            return EXIT_FENCED
        case _:
            return EXIT_FAILED


_OUTPUT = "bookmender.output"
"""Key of the output format in ``meta`` of a click context."""


def note_output(ctx: click.Context, param: click.Parameter, value: str) -> str:
    """Remember the output format, so that errors are printed in the same format."""
    if value == "json":
        ctx.meta[_OUTPUT] = value
    return value


def format_option(
    *names: str, kind: "click.ParamType[str] | None" = None, about: str = "Text or JSON."
) -> Callable[[F], F]:
    """Return the option ``output`` of a command. ``kind``: its formats; None: text and JSON."""
    return click.option(
        *names,
        "output",
        type=kind or click.Choice(["text", "json"]),
        default="text",
        show_default=True,
        is_eager=True,  # so that errors about other arguments are printed in this format, too
        callback=note_output,
        help=about,
    )


output_option = format_option("-o", "--output")


def cluster_options(command: F) -> F:
    """Add ``-c`` and ``-o`` to a command."""
    return config_option(output_option(command))


json_option = click.option(
    "--json",
    "output",
    flag_value="json",
    is_eager=True,
    callback=note_output,
    help="Same as -o json.",
)


class LedgerId(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.5 on only
    """A ledger ID in plain digits. ``int`` alone would also accept ``1_0``."""

    name = "ledger"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        if not re.fullmatch("[0-9]+", value):
            self.fail(
                f"{value!r} is not a ledger ID. Use digits only, for example 4711.", param, ctx
            )
        if len(value) > len(str(LEDGER_ID_MAX)) or int(value) > LEDGER_ID_MAX:
            shown = value if len(value) <= ID_SHOWN_MAX else f"{value[:ID_SHOWN_MAX]}…"
            self.fail(
                f"{shown} is not a ledger ID. IDs range from 0 to {LEDGER_ID_MAX}.", param, ctx
            )
        return int(value)


LEDGER_ID_MAX = 2**63 - 1
ID_SHOWN_MAX = 40
"""Digits shown of a number that is far too large."""
