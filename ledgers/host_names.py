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
from dataclasses import dataclass
from typing import Protocol, TypeVar
from weakref import WeakKeyDictionary

from ledgers.codec.registration import Address
from ledgers.errors import LocalLimitError, NameNotResolvedError
from ledgers.tasks import in_daemon_thread

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
    lookup: "asyncio.Task[None] | None" = None


def system_lookup(host: str) -> Sequence[str]:
    """Look a name up with the system's resolver."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found))


class HostNames:
    """Looks up host names for the connections of one event loop, and keeps their addresses."""

    def __init__(self, lookup: Lookup = system_lookup) -> None:
        self._lookup = lookup
        self._names: dict[str, _Name] = {}
        self._threads = asyncio.Semaphore(THREADS)
        self._failed_name_threads = asyncio.Semaphore(FAILED_NAME_THREADS)

    async def addresses(self, host: str) -> Sequence[str]:
        """Return the numeric addresses of a host. Raises NameNotResolvedError, LocalLimitError."""
        try:
            numeric = ipaddress.ip_address(host)
        except ValueError:
            pass
        else:
            return [str(getattr(numeric, "ipv4_mapped", None) or numeric)]
        name = self._names.setdefault(host, _Name())
        if name.addresses:
            if asyncio.get_running_loop().time() - name.resolved_at_s >= REFRESH_S:
                self.refresh(host)
            return name.addresses
        self.refresh(host)
        if name.lookup is not None:
            await asyncio.wait([name.lookup], timeout=LOOKUP_WAIT_S)
        if name.addresses:
            return name.addresses
        if name.limit is not None:
            raise LocalLimitError(str(name.limit), host=host)
        raise NameNotResolvedError("host name does not resolve", host=host)

    def refresh(self, host: str) -> None:
        """Start to look the host up, unless a lookup runs, or the last one failed a short time ago.
        Call it when no connection could be made, because the addresses may have changed."""
        loop, name = asyncio.get_running_loop(), self._names.get(host)
        if name is not None and name.lookup is None and loop.time() >= name.retry_at_s:
            # No TaskGroup lives as long as a lookup. Callers share the task; it ends by itself.
            name.lookup = loop.create_task(self._look_up(host, name), name=f"look up {host}")

    async def _look_up(self, host: str, name: _Name) -> None:
        found: Sequence[str] = ()
        try:
            async with self._failed_name_threads if name.failures else self._threads:
                # A daemon thread: a lookup that hangs must not keep the process alive.
                found = await in_daemon_thread(lambda: self._lookup(host))
            name.limit = None
        except LocalLimitError as error:
            name.limit = error
        except (OSError, ValueError):  # ValueError: a name that cannot be encoded
            name.limit = LocalLimitError.now()
        finally:
            name.lookup = None
        now_s = asyncio.get_running_loop().time()
        if found:
            name.addresses, name.resolved_at_s = found, now_s
            name.failures, name.retry_at_s = 0, 0.0
        elif name.limit is None:
            name.failures += 1
            wait_s = FAILED_WAIT_MIN_S * 2 ** min(name.failures - 1, 10)
            name.retry_at_s = now_s + min(wait_s, FAILED_WAIT_MAX_S)


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
    """Connect to the first address of the host that accepts the connection. Raises
    NameNotResolvedError, LocalLimitError, or the OSError of the last address."""
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
