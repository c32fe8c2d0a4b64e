"""Looks up the host names of bookies, so that a name that does not resolve delays no others.

``HostNames`` looks up names on its own threads, and ``connect`` uses it to open connections.

The resolver may need ten seconds or more to report a dead name, and ``getaddrinfo`` blocks its
thread for all that time. In asyncio's own thread pool a handful of dead names would delay every
connection. So:

- The threads are our own. Names whose last lookup failed share only a few of them.
- A caller waits for a limited time, and not at all for a name that failed recently.
- Known addresses are used at once. They are looked up again in the background, at intervals and
  after each failed connection.
"""

import asyncio
import ipaddress
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, TypeVar
from weakref import WeakKeyDictionary

from ledgers.codec.registration import Address
from ledgers.errors import LocalLimitError, NameNotResolvedError

P = TypeVar("P", bound=asyncio.BaseProtocol)
Lookup = Callable[[str], Sequence[str]]
"""Returns the numeric addresses of a host name. Blocks; raises OSError or UnicodeError."""

THREADS, FAILED_NAME_THREADS = 32, 2
"""Threads for names whose last lookup succeeded, and threads for names whose last lookup failed."""
LOOKUP_WAIT_S = 2.0
"""Time that a connection waits for the first lookup of a name."""
FAILED_WAIT_MIN_S, FAILED_WAIT_MAX_S = 10.0, 120.0
"""A name that failed is not looked up again for this long. Each failure doubles the wait."""
REFRESH_S = 60.0
"""Older addresses are looked up again in the background."""


@dataclass(slots=True)
class _Name:
    """The state of one host name. Times are loop times."""

    addresses: Sequence[str] = ()
    resolved_at_s: float = 0.0
    failures: int = 0
    retry_at_s: float = 0.0
    limit: LocalLimitError | None = None
    """Why the last lookup asked nobody."""
    lookup: "asyncio.Future[None] | None" = None


def system_lookup(host: str) -> Sequence[str]:
    """Look a name up with the system's resolver."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found))


class HostNames:
    """Looks up host names for the connections of one event loop, and keeps their addresses."""

    def __init__(self, lookup: Lookup = system_lookup) -> None:
        self._lookup = lookup
        self._names: dict[str, _Name] = {}
        self._waiting: list[tuple[str, _Name]] = []
        self._running = {False: 0, True: 0}
        """Number of running lookups: of names whose last lookup succeeded (False) or failed (True).
        """

    async def addresses(self, host: str) -> Sequence[str]:
        """Return the numeric addresses of a host. Raises NameNotResolvedError, LocalLimitError."""
        if (numeric := _numeric(host)) is not None:
            return [numeric]
        name = self._names.setdefault(host, _Name())
        now_s = asyncio.get_running_loop().time()
        if name.addresses:
            if now_s - name.resolved_at_s >= REFRESH_S:
                self._look_up(host, name)
            return name.addresses
        if name.lookup is None and now_s < name.retry_at_s:
            raise NameNotResolvedError("host name does not resolve", host=host)
        await asyncio.wait([self._look_up(host, name)], timeout=LOOKUP_WAIT_S)
        if not name.addresses:
            if name.limit is not None:
                raise LocalLimitError(str(name.limit), host=host)
            raise NameNotResolvedError("host name does not resolve", host=host)
        return name.addresses

    def refresh(self, host: str) -> None:
        """Look the host up again, because no connection could be made and its addresses may have
        changed."""
        name = self._names.get(host)
        if name is not None and name.addresses:
            self._look_up(host, name)

    def _look_up(self, host: str, name: _Name) -> "asyncio.Future[None]":
        """Start a lookup, unless one is running. Returns the future of its end, which callers
        share."""
        loop = asyncio.get_running_loop()
        if name.lookup is None:
            if loop.time() < name.retry_at_s:  # only a refresh, which can wait
                done: asyncio.Future[None] = loop.create_future()
                done.set_result(None)
                return done
            name.lookup = loop.create_future()
            self._waiting.append((host, name))
            self._start_threads(loop)
        return name.lookup

    def _start_threads(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start waiting lookups, as many as there are threads for."""
        for host, name in list(self._waiting):
            has_failed = name.failures > 0
            if self._running[has_failed] >= (FAILED_NAME_THREADS if has_failed else THREADS):
                continue
            self._waiting.remove((host, name))
            self._running[has_failed] += 1

            def work(host: str = host, name: _Name = name, has_failed: bool = has_failed) -> None:
                found, limit = [], None
                try:
                    found = list(self._lookup(host))
                except (OSError, ValueError):  # ValueError: a name that cannot be encoded
                    limit = LocalLimitError.now()
                with suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(self._note, name, found, has_failed, limit)

            try:
                # daemon: a lookup that hangs must not keep the process alive.
                threading.Thread(target=work, name=f"lookup {host}", daemon=True).start()
            except RuntimeError as error:
                loop.call_soon(self._note, name, [], has_failed, LocalLimitError.of(error))

    def _note(
        self,
        name: _Name,
        found: Sequence[str],
        had_failed: bool,
        limit: LocalLimitError | None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self._running[had_failed] -= 1
        name.limit = limit
        if found:
            name.addresses, name.resolved_at_s = found, loop.time()
            name.failures, name.retry_at_s = 0, 0.0
        elif limit is None:
            name.failures += 1
            wait_s = FAILED_WAIT_MIN_S * 2 ** min(name.failures - 1, 10)
            name.retry_at_s = loop.time() + min(wait_s, FAILED_WAIT_MAX_S)
        lookup, name.lookup = name.lookup, None
        if lookup is not None and not lookup.done():
            lookup.set_result(None)
        self._start_threads(loop)


_of_loops: "WeakKeyDictionary[asyncio.AbstractEventLoop, HostNames]" = WeakKeyDictionary()
_guard = threading.Lock()
"""Guards ``_of_loops``, because the auditor and the worker run event loops on different threads."""


def host_names() -> HostNames:
    """Return the host names of the running loop, which all of its clients share."""
    with _guard:
        return _of_loops.setdefault(asyncio.get_running_loop(), HostNames())


class Connector(Protocol):
    """Opens a connection to an address, as ``connect`` does."""

    async def __call__(
        self, factory: Callable[[], P], address: Address
    ) -> tuple[asyncio.Transport, P]: ...


async def connect(
    factory: Callable[[], P], address: Address, *, names: HostNames | None = None
) -> tuple[asyncio.Transport, P]:
    """Connect to the first address of the host that accepts the connection.

    Raises NameNotResolvedError, LocalLimitError, or the OSError of the last address.
    """
    names = names or host_names()
    loop = asyncio.get_running_loop()
    last: OSError | None = None
    for numeric in await names.addresses(address.host):
        try:
            return await loop.create_connection(factory, numeric, address.port)
        except OSError as error:
            if (failure := LocalLimitError.of(error)) is not None:
                raise failure from error
            last = error
    names.refresh(address.host)
    assert last is not None, address
    raise last


def _numeric(host: str) -> str | None:
    """Return the usual spelling of a numeric address; None for a name."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    return str(getattr(address, "ipv4_mapped", None) or address)
