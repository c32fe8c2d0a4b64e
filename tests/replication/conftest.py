"""Tests that are coroutine functions run in virtual time, on a loop that their cluster shares."""

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from tests.replication.cluster import Cluster
from tests.virtual_time import VirtualTimeLoop


@pytest.fixture(autouse=True)
def virtual_runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        yield runner


@pytest.fixture
def cluster(request: pytest.FixtureRequest, virtual_runner: asyncio.Runner) -> Cluster:
    """The cluster in memory that the module's ``scene`` makes; without one, all bookies, empty."""
    scene: Callable[[], Coroutine[Any, Any, Cluster]]
    scene = getattr(request.module, "scene", Cluster.start)
    cluster: Cluster = virtual_runner.run(scene())
    return cluster


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    given = {name: pyfuncitem.funcargs[name] for name in names}
    runner = pyfuncitem.funcargs["virtual_runner"]
    assert isinstance(runner, asyncio.Runner)
    runner.run(pyfuncitem.obj(**given))
    return True
