"""Opens a ZooKeeper session with the settings' servers and time-outs, and tells why it must wait.

A command gives up as soon as every server has failed to answer, and says why. It waits for servers
that answer but are slow. A node waits in any case, because it must survive an outage of ZooKeeper.
A session that becomes silent later is kept, and a line says that it waits.
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NoReturn

import structlog

from daemon.settings import Settings
from ledgers.errors import (
    BookmenderError,
    LocalLimitError,
    SecureConnectionError,
    UnavailableError,
)
from ledgers.store import MetadataStore
from ledgers.zookeeper.servers import ask_servers, no_session
from ledgers.zookeeper.store import ZooKeeperStore

log = structlog.get_logger()

LOOK_S = 0.2
"""Time after which a session that is not open, or an answer, counts as late enough for a look."""

Tell = Callable[[str], None]
"""Tells that the session waits for ZooKeeper, and why; or that it no longer does."""


def tell_on_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def tell_in_log(text: str) -> None:
    log.warning("zookeeper.observed", text=text)


@asynccontextmanager
async def open_store(
    settings: Settings,
    *,
    ends_with_loop: bool = False,
    is_of_node: bool = False,
    tell: Tell | None = None,
) -> AsyncIterator[ZooKeeperStore]:
    """Open a session, and close it at the end. ``ends_with_loop``: see ``ZooKeeperStore.open``.
    ``tell``: None: a node writes to its log, and a command to standard error.

    Raises UnavailableError that says why no server answers, and what to do; SettingsError if
    a file of ``[security]`` cannot be used; UnauthorizedError if ZooKeeper refuses our credentials.
    """
    tell = tell or (tell_in_log if is_of_node else tell_on_stderr)
    opening = asyncio.ensure_future(
        ZooKeeperStore.open(
            settings.uri.hosts,
            session_timeout_s=settings.zookeeper.session_timeout_s,
            connect_timeout_s=settings.zookeeper.connect_timeout_s,
            security=settings.security,
            ends_with_loop=ends_with_loop,
            request_bytes_max=settings.zookeeper.request_bytes_max,
        )
    )
    looking = asyncio.ensure_future(_give_up(settings, tell, is_of_node=is_of_node))
    try:
        await asyncio.wait([opening, looking], return_when=asyncio.FIRST_COMPLETED)
        store = opening.result() if opening.done() else looking.result()
    except (SecureConnectionError, LocalLimitError):  # their messages name the next step
        raise
    except UnavailableError as error:
        if not opening.done():
            raise
        raise await why_silent(settings) from error
    finally:
        looking.cancel()
        opening.cancel()  # without effect if it is open
        await asyncio.gather(opening, looking, return_exceptions=True)
    telling = asyncio.ensure_future(_tell_of_silence(store, settings, tell))
    try:
        yield store
    finally:
        telling.cancel()
        await store.close()


async def why_silent(settings: Settings) -> BookmenderError:
    """Return the error that says why ZooKeeper does not answer."""
    return no_session(await ask_servers(settings.uri.hosts, security=settings.security))


async def _give_up(settings: Settings, tell: Tell, *, is_of_node: bool) -> NoReturn:
    """Raise the reason when no server answers. Tell of a session that has to wait."""
    limit_s, told = settings.zookeeper.connect_timeout_s, ""
    while True:
        await asyncio.sleep(LOOK_S)
        servers = await ask_servers(settings.uri.hosts, security=settings.security)
        why = no_session(servers)
        if not is_of_node and all(each.error for each in servers.values()):
            raise why
        if told != str(why):
            told = str(why)
            tell(f"Waiting for ZooKeeper, at most {limit_s:g} s: {told}")


async def wait_silent(store: MetadataStore) -> None:
    """Return when the store is silent."""
    while not store.is_silent:  # noqa: ASYNC110  # kazoo's thread notes the times
        await asyncio.sleep(LOOK_S)


async def _tell_of_silence(store: MetadataStore, settings: Settings, tell: Tell) -> None:
    while True:
        await wait_silent(store)
        tell(f"ZooKeeper ({settings.uri.hosts}) does not answer. Waiting for it.")
        while store.is_silent:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)
        tell("ZooKeeper answers again.")
