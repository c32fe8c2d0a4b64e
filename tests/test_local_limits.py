"""A process without a file or a thread says so. It blames no bookie, no name and no ZooKeeper."""

import asyncio
import os
import resource
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import uvloop

from daemon import node
from daemon.logs import LogThread
from ledgers.bookie_auth import SecureConnector
from ledgers.client import BookieClient
from ledgers.codec.registration import Address
from ledgers.errors import JournalError, LocalLimitError
from ledgers.health import WAIT_MIN_S, AnsweringBookies, BookieHealth
from ledgers.host_names import HostNames, connect
from ledgers.security import Security, SecuritySettings
from ledgers.zookeeper.kazoo_session import KazooSession
from ledgers.zookeeper.store import ZooKeeperStore
from replication.journal import JournalRecord, MetadataJournal
from tests.ledgers.bulk_cases import LEDGER_ID, scene
from tests.ledgers.client_cases import ManualClock, answer, client_of
from tests.ledgers.scripted_bookie import scripted_bookie


def no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


NOWHERE = Address(host="127.0.0.1", port=1)


@contextmanager
def no_files(*, but: int = 0) -> Iterator[None]:
    """Forbid this process to open more than ``but`` files, sockets or pipes."""
    free = [os.open(os.devnull, os.O_RDONLY) for _ in range(but + 1)]
    for each in free:
        os.close(each)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[-1], hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def runner(request: pytest.FixtureRequest) -> Iterator[asyncio.Runner]:
    make: Callable[[], asyncio.AbstractEventLoop] = request.param
    with asyncio.Runner(loop_factory=make) as made:
        yield made


def test_no_bookie_is_quarantined_and_none_must_wait_afterwards(runner: asyncio.Runner) -> None:
    async def run() -> None:
        quarantine = BookieHealth(ManualClock(), lambda bookie: 1)
        async with (
            scene() as bulk,
            scripted_bookie(answer) as asked,
            client_of(bulk=bulk.bulk) as client,
        ):
            bookies = AnsweringBookies(client, quarantine)
            bulk.fill(range(4))
            with no_files():
                with pytest.raises(LocalLimitError, match="LimitNOFILE"):
                    await bookies.read(asked.id, LEDGER_ID, 0)
                failed = await bookies.transfer(bulk.halves(4))

            assert isinstance(failed.target_error, LocalLimitError)
            assert not failed.unresponsive
            assert not quarantine._stays
            assert await bookies.read(asked.id, LEDGER_ID, 0)
            assert not (await bookies.transfer(bulk.halves(4))).failures

    runner.run(run())


@pytest.mark.parametrize("is_written", [True, False])
def test_no_quarantine_becomes_longer(runner: asyncio.Runner, is_written: bool) -> None:
    async def run() -> None:
        clock = ManualClock()
        quarantine = BookieHealth(clock, lambda bookie: 1)
        async with scene() as bulk:
            bookies = AnsweringBookies(BookieClient(bulk.bulk), quarantine)
            bulk.fill(range(4))
            transfer = bulk.halves(4) if is_written else bulk.halves(4, target=None)
            for bookie in (bulk.a, bulk.b, *[bulk.target] * is_written):
                quarantine.note_silence(bookie.bookie_id)
            clock.advance(WAIT_MIN_S)
            with no_files():
                await bookies.transfer(transfer)  # the probe of all

            assert not quarantine.shut()
            assert not (await bookies.transfer(transfer)).failures
            assert not quarantine._stays

    runner.run(run())


def test_a_name_does_not_count_as_unknown(runner: asyncio.Runner) -> None:
    async def run() -> None:
        names = HostNames()
        with no_files(), pytest.raises(LocalLimitError):
            await connect(asyncio.Protocol, Address(host="localhost", port=1), names=names)
        assert await names.addresses("localhost")

    runner.run(run())


def test_a_certificate_does_not_count_as_wrong(runner: asyncio.Runner, tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("")
    settings = SecuritySettings(bookie_tls=True, ca_file=str(tmp_path / "ca.pem"))

    async def run() -> None:
        connector = SecureConnector(Security(settings))
        with no_files(), pytest.raises(LocalLimitError):
            await connector.connect(asyncio.Protocol, NOWHERE)

    runner.run(run())


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
@pytest.mark.parametrize(
    "but",
    [
        pytest.param(0, id="none for the thread of kazoo"),
        pytest.param(2, id="none for a name or a connection"),
    ],
)
def test_zookeeper_does_not_count_as_silent(runner: asyncio.Runner, host: str, but: int) -> None:
    async def run() -> None:
        with no_files(but=but), pytest.raises(LocalLimitError, match="LimitNOFILE"):
            await ZooKeeperStore.open(f"{host}:1", connect_timeout_s=0.5)

    runner.run(run())


def test_a_full_journal_that_cannot_be_rotated_does_not_count_as_a_full_disk(
    tmp_path: Path,
) -> None:
    record = JournalRecord(time_ms=1, ledger_id=7, before=b"", after=b"x")
    with closing(MetadataJournal(tmp_path, process="host-1", file_bytes_max=1)) as journal:
        journal.record([record])

        with no_files(), pytest.raises(JournalError, match="LimitNOFILE"):
            journal.record([record])

        journal.record([record])


@pytest.mark.parametrize(
    ("soft", "hard", "expected"),
    [
        pytest.param(1024, 4096, 4096, id="as far as the service may"),
        pytest.param(1024, resource.RLIM_INFINITY, node.FILES_MAX, id="not without end"),
        pytest.param(100_000, 200_000, None, id="never lowered"),
        pytest.param(4096, 4096, None, id="nothing to raise"),
    ],
)
def test_a_node_raises_its_soft_limit(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, expected: int | None
) -> None:
    wanted = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: wanted.append(limits))

    node._raise_file_limit()

    assert wanted == ([] if expected is None else [(expected, hard)])


def test_a_session_ends_without_a_thread_for_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its locks must become free."""

    async def run() -> list[str]:
        session = KazooSession("127.0.0.1:1", session_timeout_s=4.0)
        broken: list[str] = []
        monkeypatch.setattr(session._handler, "break_connection", lambda: broken.append("broken"))
        monkeypatch.setattr(type(session._client), "connected", True)
        with monkeypatch.context() as limited:
            limited.setattr(threading.Thread, "start", no_thread)
            with pytest.raises(LocalLimitError, match="TasksMax"):
                await session.close()
        return broken

    assert asyncio.run(run()) == ["broken"]


@pytest.mark.parametrize("thread_count", [0, 1], ids=["for kazoo", "for its end"])
def test_a_session_is_not_opened_without_a_thread(
    monkeypatch: pytest.MonkeyPatch, thread_count: int
) -> None:
    start, left = threading.Thread.start, [threading.Thread.start] * thread_count

    def limited(thread: threading.Thread) -> None:
        (left.pop() if left else no_thread)(thread)

    async def run() -> None:
        session = KazooSession("127.0.0.1:1", session_timeout_s=4.0)
        monkeypatch.setattr(threading.Thread, "start", limited)
        with pytest.raises(LocalLimitError, match="TasksMax"):
            await session.open(timeout_s=0.1)

    before = threading.enumerate()
    asyncio.run(run())
    monkeypatch.setattr(threading.Thread, "start", start)
    for thread in set(threading.enumerate()).difference(before):
        thread.join(5.0)
        assert not thread.is_alive(), "kazoo would try to connect forever"


def test_a_name_does_not_count_as_unknown_without_a_thread() -> None:
    async def run() -> None:
        names = HostNames(lambda host: ["127.0.0.1"])
        with pytest.MonkeyPatch.context() as limited:
            limited.setattr(threading.Thread, "start", no_thread)
            with pytest.raises(LocalLimitError, match="TasksMax"):
                await names.addresses("bookie-1")
        assert await names.addresses("bookie-1") == ["127.0.0.1"]

    asyncio.run(run())


def test_a_node_without_a_thread_for_its_log_can_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    before = sys.stderr

    with pytest.raises(RuntimeError), LogThread():
        pass

    assert sys.stderr is before
