"""What the main thread tells the service manager, and what signals make it do."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import pytest
import structlog

from auditor.backlog import BacklogSize
from daemon.http.health import SILENT_MAX_S
from daemon.main_loop import MainLoop, Request, status_line
from daemon.role_state import NodeService, RoleState
from daemon.service_manager import ServiceManager
from daemon.threads import ServiceThread
from replication.worker import ReplicationWorker

WATCHDOG_S = 40.0
SIZE = BacklogSize(
    by_copies_left={},
    missing_bytes=0,
    marked_count=340,
    private_count=0,
    waiting_count=0,
    oldest_mark_ms=None,
    remaining_s=None,
)


@dataclass
class RecordedManager:
    """Records messages instead of sending them."""

    watchdog_s: float | None = WATCHDOG_S
    is_present: bool = True
    sent: list[str] = field(default_factory=list)

    def ready(self) -> None:
        self.sent.append("ready")

    def reloading(self) -> None:
        self.sent.append("reloading")

    def stopping(self) -> None:
        self.sent.append("stopping")

    def feed_watchdog(self) -> None:
        self.sent.append("watchdog")

    def show(self, status: str) -> None:
        pass

    def send_waiting(self) -> None:
        pass


@dataclass
class Thread:
    """A service thread whose silence is given."""

    silent_s: float = 0.0
    probe_count: int = 0

    def probe(self) -> None:
        self.probe_count += 1


@dataclass
class State:
    """What a service publishes."""

    name: str = "worker"
    is_connected: bool = True
    is_working: bool = True
    backlog: object = None
    leased_count: int = 0


@dataclass(frozen=True)
class BacklogOf:
    size: object


def role(silent_s: float = 0.0, **published: object) -> NodeService:
    return NodeService(
        thread=cast(ServiceThread, Thread(silent_s)),
        state=cast(RoleState, State(**published)),  # type: ignore[arg-type]
    )


def loop_of(
    *roles: NodeService, reload: Callable[[], None] = lambda: None
) -> tuple[MainLoop, list[str]]:
    manager = RecordedManager()
    return MainLoop(roles, cast(ServiceManager, manager), reload=reload), manager.sent


def test_it_is_ready_once_each_service_has_a_session() -> None:
    worker, auditor = role(is_connected=False), role(name="auditor")
    loop, sent = loop_of(worker, auditor)

    loop.report(now_s=0)
    assert "ready" not in sent

    cast(State, worker.state).is_connected = True
    loop.report(now_s=1)
    cast(State, worker.state).is_connected = False
    loop.report(now_s=2)
    cast(State, worker.state).is_connected = True
    loop.report(now_s=3)
    assert sent.count("ready") == 1


def test_the_watchdog_is_fed_some_times_in_its_interval() -> None:
    loop, sent = loop_of(role(), role(name="auditor"))

    for second in range(int(WATCHDOG_S)):
        loop.report(now_s=second)

    assert sent.count("watchdog") == 4


def test_the_watchdog_starves_while_one_loop_does_not_answer() -> None:
    stuck = role(SILENT_MAX_S + 1)
    loop, sent = loop_of(role(name="auditor"), stuck)

    loop.report(now_s=0)
    assert "watchdog" not in sent
    assert cast(Thread, stuck.thread).probe_count == 1

    cast(Thread, stuck.thread).silent_s = 0
    loop.report(now_s=1)
    assert "watchdog" in sent


def test_a_service_without_zookeeper_still_feeds_the_watchdog() -> None:
    """A restart would not help."""
    loop, sent = loop_of(role(is_connected=False))

    loop.report(now_s=0)

    assert sent == ["watchdog"]


def test_requests_are_done_in_their_order() -> None:
    done: list[str] = []
    loop, sent = loop_of(role(), reload=lambda: done.append("reload"))
    loop.ask(Request.RELOAD)
    loop.ask(Request.STOP)

    loop.run()

    assert done == ["reload"]
    assert [each for each in sent if each != "watchdog"] == [
        "ready",
        "reloading",
        "ready",
        "stopping",
    ]


def test_a_reload_that_fails_does_not_stop_the_node() -> None:
    done: list[int] = []

    def fail() -> None:
        done.append(1)
        raise OSError("the disk does not answer")

    loop, sent = loop_of(role(), reload=fail)
    for request in (Request.RELOAD, Request.RELOAD, Request.STOP):
        loop.ask(request)

    with structlog.testing.capture_logs() as events:
        loop.run()

    assert done == [1, 1]
    assert [event["event"] for event in events] == ["settings.reload_failed"] * 2
    assert sent[-3:] == ["reloading", "ready", "stopping"]


def test_a_reload_before_the_node_is_ready_does_not_claim_that_it_is() -> None:
    loop, sent = loop_of(role(is_connected=False))
    loop.ask(Request.RELOAD)
    loop.ask(Request.STOP)

    loop.run()

    assert sent == ["watchdog", "stopping"]


def test_without_a_service_manager_it_waits_for_requests() -> None:
    manager = ServiceManager("")
    loop = MainLoop([role()], manager, reload=lambda: None)
    asking = threading.Timer(0.05, loop.ask, [Request.STOP])

    asking.start()
    loop.run()

    asking.join()


@pytest.mark.parametrize(
    ("state", "text"),
    [
        pytest.param({}, "worker: waiting for marked ledgers", id="idle worker"),
        pytest.param({"leased_count": 1}, "worker: repairing 1 ledger", id="one repair"),
        pytest.param({"leased_count": 12}, "worker: repairing 12 ledgers", id="many repairs"),
        pytest.param({"name": "auditor"}, "auditor: on standby", id="another node leads"),
        pytest.param(
            {"name": "auditor", "backlog": BacklogOf(None)}, "auditor: leading", id="a new leader"
        ),
        pytest.param(
            {"name": "auditor", "backlog": BacklogOf(SIZE)},
            "auditor: leading, 340 ledgers marked",
            id="a leader that has counted",
        ),
        pytest.param({"is_connected": False}, "worker: waiting for ZooKeeper", id="no session"),
        pytest.param({"is_working": False}, "worker: starting", id="starting"),
        pytest.param({"name": "observer"}, "observer: working", id="observe mode"),
    ],
)
def test_the_status_says_what_a_service_does(state: dict[str, object], text: str) -> None:
    assert status_line([role(**state)]) == text  # type: ignore[arg-type]


def test_the_status_names_a_loop_that_does_not_answer() -> None:
    assert status_line([role(name="auditor"), role(SILENT_MAX_S + 1)]) == (
        "auditor: on standby; worker: the event loop does not answer"
    )


def test_a_service_publishes_how_many_ledgers_its_worker_has_leased() -> None:
    @dataclass
    class Worker:
        leased_count: int = 3

    state = RoleState("worker")
    assert state.leased_count == 0

    with state.working(cast(ReplicationWorker, Worker())):
        assert (state.is_working, state.leased_count) == (True, 3)

    assert (state.is_working, state.leased_count) == (False, 0)
