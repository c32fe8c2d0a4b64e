"""Health of a node: do its event loops answer, and has each service a session?"""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from daemon.http import health
from daemon.http.health import alive, ready
from daemon.role_state import NodeService, RoleState
from daemon.settings import HttpSettings
from daemon.threads import ServiceThread
from ledgers.store import SessionState
from tests.daemon.http.serving import checked, serving
from tests.replication.cluster import Cluster

PATIENCE_S = 30.0


class Store:
    """As much of a store as health looks at."""

    state = SessionState.CONNECTED
    is_silent = False
    silent_s = 0.0


class Service:
    """A service thread whose loop can be blocked."""

    def __init__(self, name: str) -> None:
        self.state = RoleState(name)
        self.is_running, self.may_go_on = threading.Event(), threading.Event()
        self.may_go_on.set()
        self.thread = ServiceThread(name, self._session)

    async def _session(self) -> None:
        self.is_running.set()
        while True:
            await asyncio.sleep(0.01)
            self.may_go_on.wait(PATIENCE_S)

    @property
    def role(self) -> NodeService:
        return NodeService(thread=self.thread, state=self.state)

    def become_ready(self) -> None:
        self.state.store = Store()  # type: ignore[assignment]
        self.state.is_working = True


@pytest.fixture
def services() -> Iterator[tuple[Service, Service]]:
    pair = Service("worker"), Service("auditor")
    for service in pair:
        service.thread.start()
        assert service.is_running.wait(PATIENCE_S)
    yield pair
    for service in pair:
        service.may_go_on.set()
        assert service.thread.stop(timeout_s=PATIENCE_S)


async def wait_silent(service: Service) -> None:
    while not service.thread.silent_s:
        service.thread.probe()
        await asyncio.sleep(0.01)


def test_a_node_is_alive_while_its_loops_answer(
    services: tuple[Service, Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "SILENT_MAX_S", 0.2)
    worker, auditor = services
    roles = [worker.role, auditor.role]

    async def test() -> None:
        async with asyncio.TaskGroup() as tasks:
            probing = tasks.create_task(health.probe(roles))
            assert alive(roles).is_ok
            auditor.may_go_on.clear()
            await wait_silent(auditor)
            await asyncio.sleep(0.3)
            stuck = alive(roles)
            assert (stuck.is_ok, [role.is_alive for role in stuck.roles]) == (False, [True, False])
            assert stuck.problem is not None
            assert stuck.problem.startswith("auditor: the event loop does not answer")
            auditor.may_go_on.set()
            async with asyncio.timeout(PATIENCE_S):
                while not alive(roles).is_ok:  # noqa: ASYNC110  # no event tells of it
                    await asyncio.sleep(0.01)
            probing.cancel()

    asyncio.run(test())


def test_a_thread_that_has_ended_is_not_alive(services: tuple[Service, Service]) -> None:
    worker, _ = services
    worker.thread.stop(timeout_s=PATIENCE_S)

    found = alive([worker.role])

    assert (found.is_ok, found.roles[0].silent_s) == (False, None)


@pytest.mark.parametrize(
    ("session", "is_working", "problem"),
    [
        (None, False, "worker: ZooKeeper does not answer"),
        (SessionState.SUSPENDED, True, "worker: ZooKeeper does not answer"),
        (SessionState.LOST, True, "worker: ZooKeeper does not answer"),
        (SessionState.CONNECTED, False, "worker: the role is starting"),
        (SessionState.CONNECTED, True, None),
    ],
)
def test_a_node_is_ready_when_each_service_has_a_session_and_works(
    services: tuple[Service, Service],
    session: SessionState | None,
    is_working: bool,
    problem: str | None,
) -> None:
    worker, auditor = services
    auditor.become_ready()
    worker.become_ready()
    worker.state.is_working = is_working
    if session is None:
        worker.state.store = None
    else:
        store = Store()
        store.state = session
        worker.state.store = store  # type: ignore[assignment]

    found = ready([worker.role, auditor.role])

    assert (found.is_ok, found.problem) == (problem is None, problem)


def test_a_node_is_not_ready_while_zookeeper_is_silent(
    services: tuple[Service, Service],
) -> None:
    worker, _ = services
    worker.become_ready()
    assert ready([worker.role]).is_ok

    worker.state.store.is_silent = True  # type: ignore[misc, union-attr]

    assert ready([worker.role]).problem == "worker: ZooKeeper does not answer"
    assert alive([worker.role]).is_ok


def test_health_is_served_with_a_status_that_probes_understand(
    services: tuple[Service, Service],
) -> None:
    worker, auditor = services

    async def test() -> None:
        roles = [worker.role, auditor.role]
        async with serving(await Cluster.start(), HttpSettings(), roles=roles) as client:
            lives = await client.get("/healthz")
            assert lives.status == 200
            await checked(lives, "/healthz")
            unready = await client.get("/readyz")
            assert unready.status == 503
            assert (await checked(unready, "/readyz"))["is_ok"] is False
            for service in services:
                service.become_ready()
            assert (await client.get("/readyz")).status == 200
            assert (await client.head("/readyz")).status == 200
            node = await checked(await client.get("/api/v1/node"), "/api/v1/node")
            assert [role["is_working"] for role in node["roles"]] == [True, True]

    asyncio.run(test())


def test_a_role_publishes_only_while_it_runs() -> None:
    state, store = RoleState("worker"), Store()
    with state.in_session(store), state.working():  # type: ignore[arg-type]
        assert state.is_ready
    assert not state.is_ready
    assert state.store is None
