"""Asks each ZooKeeper server whether it answers, and says why no session can be opened.

``ask_servers`` sends the command ``srvr`` on a connection of its own. A server answers it even
while it is too slow to open sessions. So such a server is told from one that is frozen.
"""

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ledgers.codec.registration import Address, parse_address
from ledgers.errors import (
    BookmenderError,
    LocalLimitError,
    NameNotResolvedError,
    SecureConnectionError,
    UnavailableError,
)
from ledgers.host_names import host_names
from ledgers.security import OPEN, SecuritySettings, security_for, tls_failure
from ledgers.tasks import in_daemon_thread

ANSWER_S = 1.6
"""Time that each server has for its answer, with the look-up of its name."""
PORT = 2181
"""Port of a server whose address names none."""
NOT_SERVING = "not currently serving requests"
"""Part of the answer of a server without quorum."""

WRONG_ADDRESS = "start the servers, or correct metadata_service_uri"
WRONG_SECURITY = "correct the section [security] of the settings, or the file that it names"


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """The answer of a server. ``version``: empty if the server does not tell it. ``error``: why it
    serves nobody; empty if it does. ``advice``: what to do then."""

    version: str = ""
    mode: str = ""
    error: str = ""
    advice: str = WRONG_ADDRESS
    is_insecure: bool = False
    """The error is about TLS."""


async def ask_servers(hosts: str, *, security: SecuritySettings = OPEN) -> dict[str, Server]:
    """Return the answer of each server, by its address in ``hosts``. Takes ``ANSWER_S`` at most.

    Raises SettingsError if a file of ``security`` cannot be used, LocalLimitError.
    """
    names = hosts.split(",")
    answers = await asyncio.gather(*(ask_server(name, security=security) for name in names))
    return dict(zip(names, answers, strict=True))


async def ask_server(host: str, *, security: SecuritySettings = OPEN) -> Server:
    """Connect to the server, and ask for its version. Raises what ``ask_servers`` raises."""
    tls = await in_daemon_thread(security_for(security).zookeeper_tls)
    address = parse_address(host) or Address(host=host, port=PORT)
    where = f"{address.host}:{address.port}"
    is_connected = False
    try:
        async with asyncio.timeout(ANSWER_S):
            ip = (await host_names().addresses(address.host))[0]
            reader, writer = await asyncio.open_connection(ip, address.port)
            is_connected = True
            try:
                if tls is not None:
                    try:
                        await writer.start_tls(tls, server_hostname=address.host)
                    except OSError as error:
                        told = tls_failure(error, security, server="ZooKeeper", host=address.host)
                        return Server(error=told, advice=WRONG_SECURITY, is_insecure=True)
                writer.write(b"srvr")
                return parse_server(await reader.read(4096), where)
            finally:
                writer.close()
    except NameNotResolvedError:
        return Server(
            error=f"no address of host {address.host} is known",
            advice="correct metadata_service_uri, or add the host to DNS or /etc/hosts",
        )
    except (TimeoutError, OSError) as error:
        if failure := LocalLimitError.of(error):
            raise failure from error
        return unreached(error, where, is_connected=is_connected)


def unreached(error: OSError, where: str, *, is_connected: bool) -> Server:
    """Return why the server at the address ``where`` gave no answer."""
    if isinstance(error, ConnectionRefusedError):
        return Server(error=f"nothing listens at {where}")
    if isinstance(error, ConnectionError):
        return parse_server(b"", where)
    if not is_connected:
        why = error.strerror or "no connection in time"
        return Server(
            error=f"{where} cannot be reached ({why})",
            advice="check that its host and its process run, the network and the firewall",
        )
    return Server(
        error=f"ZooKeeper at {where} accepts connections but does not answer",
        advice="look whether its process is stopped, overloaded, or waits for its disk",
    )


def parse_server(answer: bytes, where: str) -> Server:
    """Parse the reply to ``srvr``. Servers may refuse the command, but answer it."""
    text = answer.decode(errors="replace")
    if not text:
        return Server(
            error=f"{where} closes connections without an answer",
            advice="check that this is ZooKeeper's port, with or without TLS as "
            "security.zookeeper_tls says, and the server's maxClientCnxns",
        )
    if NOT_SERVING in text:
        return Server(
            error=f"ZooKeeper at {where} runs, but has no quorum",
            advice="start the other servers, and check that the servers reach each other",
        )
    version = re.search(r"version: ([0-9.]+)", text)
    mode = re.search(r"^Mode: (\w+)", text, re.MULTILINE)
    return Server(version=version[1] if version else "", mode=mode[1] if mode else "")


def no_session(servers: Mapping[str, Server]) -> BookmenderError:
    """Return the error that says why these servers open no session, and what to do."""
    failed = [each for each in servers.values() if each.error]
    if len(failed) < len(servers):
        answering = " and ".join(host for host, each in servers.items() if not each.error)
        return UnavailableError(
            f"ZooKeeper at {answering} runs, but serves no session in time: look at its load and "
            "disk, and at the other servers, or raise zookeeper.connect_timeout_s"
        )
    first = next((each for each in failed if each.is_insecure), failed[0])
    if first.is_insecure:
        return SecureConnectionError(first.error)
    if len(failed) == 1:
        return UnavailableError(f"{first.error}: {first.advice}")
    causes = "; ".join(each.error for each in failed)
    is_same = len({each.advice for each in failed}) == 1
    advice = first.advice if is_same else WRONG_ADDRESS
    return UnavailableError(f"no ZooKeeper server answers: {causes}. Next: {advice}")
