"""``bookmender notify``: serves notifications, and receives them on the command line."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace as replace_settings
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click
import msgspec
from msgspec.structs import replace

from daemon.admin_session import admin_session
from daemon.answers import Answer
from daemon.cli.feed_follow import printing, running, watch_reader
from daemon.cli.main import EXIT_UNKNOWN, CommandGroup, config_option, output_option
from daemon.cli.output import echo, table
from daemon.cli.session import run_in_session, settings_for_command
from daemon.http.access import read_token
from daemon.logs import LogThread, set_up_logs
from daemon.words import duration_text, printable
from ledgers.errors import UnauthorizedError, UnavailableError
from ledgers.tasks import task_scope
from notifications.client import (
    Change,
    Fresh,
    Notifications,
    Refused,
    Stale,
    ask,
    bookie,
    ledger,
    published,
)
from notifications.discovery import ClientRecord, ServerRecord, read_servers
from notifications.protocol import check_key


def _checked_urls(ctx: click.Context, param: click.Parameter, urls: Sequence[str]) -> Sequence[str]:
    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise click.BadParameter(f"{url!r} is no URL, such as http://HOST:7319")
    return urls


server_option = click.option(
    "--server",
    "servers",
    multiple=True,
    callback=_checked_urls,
    help="URL of a server; else all that ZooKeeper lists.",
)
token_option = click.option(
    "--token-file", type=click.Path(dir_okay=False), default="", help="Token that servers want."
)


NO_SERVER = (
    "No server of notifications is ready. Start one: bookmender notify serve. It waits until the "
    "change feed is enabled: bookmender feed enable."
)


@click.group(cls=CommandGroup)
def notify() -> None:
    """Tell programs that their ledgers changed.

    \b
      bookmender notify serve                         run a server, until Ctrl-C
      bookmender notify watch 7 --exec ./reopen.sh    run a command at each change of ledger 7
      curl -N 'http://127.0.0.1:7319/v1/events?key=L7'

    Programs can also watch bookies, and objects that they publish themselves. A server keeps
    nothing on disk. Run two or more, on any host that reaches ZooKeeper and the bookies. The change
    feed must be enabled (bookmender feed enable). docs/notifications.md has the client library.
    """


@notify.command()
@config_option
def serve(config: Path | None) -> None:
    """Run a server until SIGTERM or Ctrl-C.

    Address, TLS and token are those of [http]; the port is that of [notify]. When it ends, its
    clients go to the other servers.
    """
    from daemon.notify import run_server

    settings = settings_for_command(config)
    with LogThread():
        set_up_logs(settings.log)
        run_server(settings)


class Notification(Answer, frozen=True, kw_only=True):
    """An object that changed. ``version``: a zxid; ``null`` if it is unknown: read the object."""

    key: str
    version: int | None
    is_deleted: bool

    def to_line(self) -> str:
        fields = {"key": self.key, "version": self.version, "is_deleted": self.is_deleted}
        return json.dumps(fields)

    def variables(self) -> dict[str, str]:
        """Return the environment variables of a command."""
        return {
            "NOTIFY_KEY": self.key,
            "NOTIFY_NAME": self.key[1:],
            "NOTIFY_VERSION": "" if self.version is None else str(self.version),
            "NOTIFY_DELETED": str(int(self.is_deleted)),
        }

    def to_text(self) -> str:
        what = "deleted" if self.is_deleted else "changed"
        version = "unknown" if self.version is None else f"{self.version:#x}"
        return f"{self.key}  {what}  version {version}"


class Version(click.ParamType[int]):
    """A version as these commands print it (0x661), or as JSON has it (1633)."""

    name = "version"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            version = value if isinstance(value, int) else int(value, 0)
        except ValueError:
            version = -1
        if not 0 <= version < 1 << 63:
            self.fail(f"{value!r} is no version, such as 0x661 or 1633", param, ctx)
        return int(version)


@notify.command()
@click.argument("ledgers", nargs=-1, type=int, metavar="[LEDGER]...")
@click.option("--bookie", "bookies", multiple=True, help="Also watch this bookie.")
@click.option("--object", "objects", multiple=True, help="Also watch this published object.")
@click.option("--exec", "command", help="Shell command to run for each change.")
@click.option("--state", default="", help="File that keeps what is done, for a restart.")
@click.option(
    "--known", type=Version(), default="0", help="Version of all objects that you have: 0x661."
)
@server_option
@token_option
@config_option
@output_option
def watch(
    ledgers: Sequence[int],
    bookies: Sequence[str],
    objects: Sequence[str],
    command: str | None,
    state: str,
    known: int,
    servers: Sequence[str],
    token_file: str,
    config: Path | None,
    output: str,
) -> None:
    """Print changes, or run a command for each.

    \b
      bookmender notify watch 7 8 --bookie host:3181
      bookmender notify watch 7 --exec ./reopen.sh --state /var/tmp/seen

    Only the latest version counts: several changes in a row may be told as one. At first, each
    object is told once, unless --known or --state say that you have its version.

    The command gets NOTIFY_KEY (L7 is ledger 7), NOTIFY_NAME, NOTIFY_VERSION (empty if it is
    unknown) and NOTIFY_DELETED (0 or 1), and the same as JSON on standard input. A failed command
    is told on standard error, and run again at the next change.
    """
    keys = [ledger(each) for each in ledgers]
    keys += [bookie(each) for each in bookies] + [published(each) for each in objects]
    if not keys:
        raise click.UsageError("name a ledger, or use --bookie or --object.")
    for key in keys:
        check_key(key)
    handle = printing(output) if command is None else running(command)

    settings = settings_for_command(config)

    async def follow() -> None:
        urls = await _urls(servers, config)
        set_up_logs(replace_settings(settings.log, level="warning"))  # such as lost servers
        async with (
            task_scope() as scope,
            Notifications.open(
                *urls, name=f"watch-{os.getpid()}", token_file=token_file, state_file=state
            ) as notifications,
        ):
            if command is None:
                scope.start(watch_reader())
            for key in keys:
                notifications.register(key, known)
            async for item in notifications:
                if isinstance(item, Change):
                    shown = Notification(
                        key=item.key, version=item.version, is_deleted=item.is_deleted
                    )
                    if (failure := await handle(shown)) is not None:
                        click.echo(f"{item.key}: {printable(failure)}", err=True)
                else:
                    click.echo(_note(item), err=True)

    asyncio.run(follow())


def _note(item: Refused | Stale | Fresh) -> str:
    match item:
        case Refused():
            return f"The server refuses {', '.join(item.keys)}: {item.code}."
        case Stale():
            return (
                f"Changes of the last {duration_text(item.age_s)} may not be told: no server can "
                "be reached, or none has heard anything new. It goes on by itself; bookmender "
                "notify servers shows them."
            )
        case Fresh():
            return "All changes are told again."


class NotifyServers(Answer, frozen=True, kw_only=True):
    """The servers that live."""

    servers: list[ServerRecord]


@notify.command("servers")
@config_option
@output_option
def servers_command(config: Path | None, output: str) -> None:
    """List the running servers.

    The list shows how many clients each one has, and how fresh it is.
    """

    found = run_in_session(config, lambda here: read_servers(here.store, here.paths))
    rows = [
        {
            "server": record.server[:8],
            "url": printable(record.url),
            "clients": str(record.clients),
            "heard": f"{duration_text(record.age_s)} ago",
        }
        for record in found
    ]
    text = "\n".join(table(rows)) if rows else NO_SERVER
    echo(output, NotifyServers(servers=found), text)


class NotifyClients(Answer, frozen=True, kw_only=True):
    """The connected clients of all servers."""

    clients: list[ClientRecord]
    unreachable: list[str]
    """URLs of servers that do not answer. Their clients are not listed."""


@notify.command()
@server_option
@token_option
@config_option
@output_option
def clients(servers: Sequence[str], token_file: str, config: Path | None, output: str) -> None:
    """List the connected clients of all servers."""

    unreachable: list[str] = []

    async def act() -> list[ClientRecord]:
        found = []
        for url in await _urls(servers, config):
            try:
                rows = _clients.decode(await _ask("GET", f"{url}/v1/clients", token_file))
            except UnavailableError:  # a dead server is listed until its session ends
                unreachable.append(url)
            else:
                found += [replace(row, server=url) for row in rows]
        return found

    found = asyncio.run(act())
    rows = [
        {
            "name": printable(row.name or row.client[:8]),
            "objects": str(row.objects),
            "waiting": str(row.waiting),
            "server": printable(row.server),
        }
        for row in found
    ]
    lines = table(rows) or ["No client is connected."]
    lines += [f"{printable(url)} does not answer." for url in unreachable]
    echo(output, NotifyClients(clients=found, unreachable=unreachable), "\n".join(lines))
    sys.exit(EXIT_UNKNOWN if unreachable else 0)


_clients = msgspec.json.Decoder(list[ClientRecord])


class PublishedObject(Answer, frozen=True, kw_only=True):
    """A published object and its new version, a zxid."""

    key: str
    version: int


@notify.command()
@click.argument("name")
@click.option("--delete", is_flag=True, help="The object does not exist any more.")
@server_option
@token_option
@config_option
@output_option
def publish(
    name: str,
    delete: bool,
    servers: Sequence[str],
    token_file: str,
    config: Path | None,
    output: str,
) -> None:
    """Tell clients that the object NAME changed.

    That is all clients that registered for it. Prints its new version once that is durable. This is
    a change, so it needs the token.
    """
    check_key(published(name))

    async def act() -> bytes:
        method, *urls = "DELETE" if delete else "POST", *await _urls(servers, config)
        for number, url in enumerate(urls, start=1):
            try:
                return await _ask(method, f"{url}/v1/objects/{quote(name, safe='')}", token_file)
            except UnavailableError:  # it may have ended just now
                if number == len(urls):
                    raise
        raise AssertionError("there is at least one server")

    found = _published.decode(asyncio.run(act()))
    echo(output, found, f"{printable(name)} has version {found.version:#x}")


_published = msgspec.json.Decoder(PublishedObject)


async def _urls(given: Sequence[str], config: Path | None) -> list[str]:
    """Return the servers: those given, else those in ZooKeeper. Raises UnavailableError."""
    if given:
        return list(given)
    async with admin_session(settings_for_command(config)) as cluster:
        found = await read_servers(cluster.store, cluster.paths)
    if not found:
        raise UnavailableError(f"{NO_SERVER} Or name one: --server URL")
    return [record.url for record in found]


async def _ask(method: str, url: str, token_file: str) -> bytes:
    token = read_token(token_file).reveal() if token_file else ""
    try:
        return await ask(method, url, token=token)
    except UnauthorizedError as error:
        raise UnauthorizedError(
            f"{error}. Name a file with its token: --token-file FILE"
        ) from error
