"""Looks up the host names of bookies, so that a name that does not resolve delays no others.

``HostNames`` looks up names on its own threads, and ``connect`` uses it to open connections.

The resolver may need ten seconds or more to report a dead name, and ``getaddrinfo`` blocks its thread
for all that time. In asyncio's own thread pool a handful of dead names would delay every connection.
So:

- The threads are our own. Names whose last lookup failed share only a few of them.
- A caller waits for a limited time, and not at all for a name that failed recently.
- Known addresses are used at once. They are looked up again in the background, at intervals and after
  each failed connection.
"""

import asyncio
import ipaddress
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar
from weakref import WeakKeyDictionary

from ledgers.codec.registration import Address
from ledgers.errors import NameNotResolvedError

P = TypeVar("P", bound=asyncio.BaseProtocol)
Lookup = Callable[[str], Sequence[str]]
"""Returns the numeric addresses of a host name. Blocks; raises OSError or UnicodeError."""

THREADS, SUSPECT_THREADS = 32, 2
"""For names without a bad record, and for those with one."""
LOOKUP_WAIT_S = 2.0
"""How long a connection waits for the first look-up of a name."""
FAILED_WAIT_MIN_S, FAILED_WAIT_MAX_S = 10.0, 120.0
"""How long a name that failed is not looked up again; each failure doubles the wait."""
REFRESH_S = 60.0
"""Addresses older than that are looked up again while they are used."""


@dataclass(slots=True)
class _Name:
    """What is known of one host name. Times are the loop's."""

    addresses: Sequence[str] = ()
    resolved_at_s: float = 0.0
    failures: int = 0
    retry_at_s: float = 0.0
    looking: "asyncio.Future[None] | None" = None


def system_lookup(host: str) -> Sequence[str]:
    """By the system's resolver."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found))


class HostNames:
    """The names that one event loop connects to."""

    def __init__(self, lookup: Lookup = system_lookup) -> None:
        self._lookup = lookup
        self._names: dict[str, _Name] = {}
        self._waiting: list[tuple[str, _Name]] = []
        self._running = {False: 0, True: 0}
        """Look-ups under way, by whether the name has a bad record."""

    async def addresses(self, host: str) -> Sequence[str]:
        """The host's numeric addresses. Raises NameNotResolvedError."""
        if _is_numeric(host):
            return [host]
        name = self._names.setdefault(host, _Name())
        now_s = asyncio.get_running_loop().time()
        if name.addresses:
            if now_s - name.resolved_at_s >= REFRESH_S:
                self._look_up(host, name)
            return name.addresses
        if name.looking is None and now_s < name.retry_at_s:
            raise NameNotResolvedError("host name does not resolve", host=host)
        await asyncio.wait([self._look_up(host, name)], timeout=LOOKUP_WAIT_S)
        if not name.addresses:
            raise NameNotResolvedError("host name does not resolve", host=host)
        return name.addresses

    def doubt(self, host: str) -> None:
        """No connection to the host could be made: its addresses may have changed."""
        name = self._names.get(host)
        if name is not None and name.addresses:
            self._look_up(host, name)

    def _look_up(self, host: str, name: _Name) -> "asyncio.Future[None]":
        """One look-up of a name at a time; whoever waits for it shares it."""
        loop = asyncio.get_running_loop()
        if name.looking is None:
            if loop.time() < name.retry_at_s:  # a refresh of addresses that are used meanwhile
                done: asyncio.Future[None] = loop.create_future()
                done.set_result(None)
                return done
            name.looking = loop.create_future()
            self._waiting.append((host, name))
            self._start_threads(loop)
        return name.looking

    def _start_threads(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin the look-ups that there are threads for; names with a bad record share a few of
        them."""
        for host, name in list(self._waiting):
            is_suspect = name.failures > 0
            if self._running[is_suspect] >= (SUSPECT_THREADS if is_suspect else THREADS):
                continue
            self._waiting.remove((host, name))
            self._running[is_suspect] += 1

            def work(host: str = host, name: _Name = name, is_suspect: bool = is_suspect) -> None:
                try:
                    found = list(self._lookup(host))
                except (OSError, UnicodeError):
                    found = []
                with suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(self._note, name, found, is_suspect)

            # daemon: a name that hangs must not keep a process from ending.
            threading.Thread(target=work, name=f"look-up {host}", daemon=True).start()

    def _note(self, name: _Name, found: Sequence[str], was_suspect: bool) -> None:
        loop = asyncio.get_running_loop()
        self._running[was_suspect] -= 1
        if found:
            name.addresses, name.resolved_at_s = found, loop.time()
            name.failures, name.retry_at_s = 0, 0.0
        else:
            name.failures += 1
            wait_s = FAILED_WAIT_MIN_S * 2 ** min(name.failures - 1, 10)
            name.retry_at_s = loop.time() + min(wait_s, FAILED_WAIT_MAX_S)
        looking, name.looking = name.looking, None
        if looking is not None and not looking.done():
            looking.set_result(None)
        self._start_threads(loop)


_of_loops: "WeakKeyDictionary[asyncio.AbstractEventLoop, HostNames]" = WeakKeyDictionary()
_guard = threading.Lock()
"""Guards ``_of_loops``: the auditor's and the worker's loops run in threads of their own."""


def host_names() -> HostNames:
    """Those of the running loop: its clients share what they learn."""
    with _guard:
        return _of_loops.setdefault(asyncio.get_running_loop(), HostNames())


async def connect(
    factory: Callable[[], P], address: Address, *, names: HostNames | None = None
) -> tuple[asyncio.Transport, P]:
    """Connect to the first of the host's addresses that takes it.

    Raises NameNotResolvedError, or the OSError of the last address that was tried.
    """
    names = names or host_names()
    loop = asyncio.get_running_loop()
    last: OSError | None = None
    for numeric in await names.addresses(address.host):
        try:
            return await loop.create_connection(factory, numeric, address.port)
        except OSError as error:
            last = error
    names.doubt(address.host)
    assert last is not None, address
    raise last


def _is_numeric(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True
