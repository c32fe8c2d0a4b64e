"""Why no ZooKeeper server serves a session."""

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path

import pytest

from daemon.local.ports import LOOPBACK, free_ports
from daemon.local.security import Authority
from ledgers.errors import SecureConnectionError, UnavailableError
from ledgers.security import SecuritySettings
from ledgers.zookeeper import servers
from ledgers.zookeeper.servers import Server, ask_server, no_session
from tests.certificates import need_openssl

NO_QUORUM = b"This ZooKeeper instance is not currently serving requests\n"
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def answering(answer: bytes) -> Serve:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):
            if await reader.read(4) == b"srvr":
                writer.write(answer)

    return serve


async def stay_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with closing(writer):
        await reader.read()


async def asked(
    serve: Serve, *, security: SecuritySettings, at_server: ssl.SSLContext | None = None
) -> tuple[Server, str]:
    """Return the answer of a server, and its address."""
    async with await asyncio.start_server(serve, LOOPBACK, ssl=at_server) as serving:
        where = f"{LOOPBACK}:{serving.sockets[0].getsockname()[1]}"
        return await ask_server(where, security=security), where


@pytest.mark.parametrize(
    ("serve", "told"),
    [
        pytest.param(answering(b"Zookeeper version: 3.9.5-x\nMode: leader\n"), "", id="a leader"),
        pytest.param(answering(b"srvr is not in the whitelist.\n"), "", id="not allowed to tell"),
        pytest.param(
            answering(NO_QUORUM), "ZooKeeper at {} runs, but has no quorum", id="no quorum"
        ),
        pytest.param(
            answering(b""), "{} closes connections without an answer", id="perhaps expects TLS"
        ),
        pytest.param(
            stay_silent, "ZooKeeper at {} accepts connections but does not answer", id="frozen"
        ),
    ],
)
def test_a_server_is_judged_by_its_answer(
    serve: Serve, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if serve is stay_silent:
        monkeypatch.setattr(servers, "ANSWER_S", 0.1)

    server, where = asyncio.run(asked(serve, security=SecuritySettings()))

    assert server.error == told.format(where)


def test_a_server_that_is_not_there_is_told_from_an_unknown_host() -> None:
    closed, unknown = f"{LOOPBACK}:{free_ports(1)[0]}", "no-such-host.invalid"

    assert asyncio.run(ask_server(closed)).error == f"nothing listens at {closed}"
    assert asyncio.run(ask_server(unknown)).error == f"no address of host {unknown} is known"


@pytest.mark.parametrize(
    ("has_tls", "certified", "told"),
    [
        pytest.param(True, LOOPBACK, "", id="as the settings say"),
        pytest.param(True, "elsewhere.example", "the certificate of ZooKeeper", id="another host"),
        pytest.param(False, LOOPBACK, "check that TLS is on at this port", id="clear text"),
    ],
)
def test_a_server_is_asked_over_tls(
    tmp_path: Path, has_tls: bool, certified: str, told: str
) -> None:
    need_openssl()
    authority = Authority(tmp_path)
    at_server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    at_server.load_cert_chain(authority.issue("server", hosts=[certified]).both)
    security = SecuritySettings(zookeeper_tls=True, ca_file=str(authority.certificate))
    serve = answering(b"Zookeeper version: 3.9.5-x\nMode: leader\n")

    server, _ = asyncio.run(
        asked(serve, security=security, at_server=at_server if has_tls else None)
    )

    if told:
        assert told in server.error
        assert server.is_insecure
    else:
        assert server == Server(version="3.9.5", mode="leader")


GONE, UNKNOWN = Server(error="a is gone"), Server(error="b is unknown", advice="use DNS")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        pytest.param({"a": UNKNOWN}, "b is unknown: use DNS", id="the only one"),
        pytest.param(
            {"a": GONE, "b": UNKNOWN},
            f"no ZooKeeper server answers: a is gone; b is unknown. Next: {servers.WRONG_ADDRESS}",
            id="one next step for several causes",
        ),
        pytest.param({"a": Server(), "b": GONE}, "ZooKeeper at a runs", id="one is slow"),
    ],
)
def test_the_error_has_each_cause_and_one_next_step(given: dict[str, Server], told: str) -> None:
    error = no_session(given)

    assert isinstance(error, UnavailableError)
    assert str(error).startswith(told)


def test_what_tls_refuses_stays_a_failure_of_tls() -> None:
    refused = Server(error="a wrong certificate", is_insecure=True)

    error = no_session({"a": GONE, "b": refused})

    assert isinstance(error, SecureConnectionError)
    assert str(error) == "a wrong certificate"
