"""Sends generated requests to the server, right and wrong ones, and compares each answer with the
OpenAPI document: status, content type, body, and whether the request had to be refused."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.config import SchemathesisConfig

from daemon.http.endpoints import ENDPOINTS
from daemon.http.openapi import describe
from daemon.settings import HttpSettings
from replication.znodes import recovery_delay_to_bytes
from tests.daemon.http.serving import BEARER, TOKEN, serving
from tests.daemon.http.test_api import trouble
from tests.replication.cluster import Cluster
from tests.replication.nodes import PATHS

SEED = 20261127
REQUESTS = 25
"""Of each operation and kind: right or wrong."""
PATIENCE_S = 60.0
LIKE_JAVA = ("unsupported_method", "allow_header_conformance")
"""Checks that BookKeeper's paths fail on purpose: like Java's server, they answer 404 to a method
that they do not have. They also ignore unknown parameters."""
RULES = ('{"error":"since: ', '{"error":"reason: ')
"""Beginnings of refusals of values that a schema cannot exclude: a duration of 0 s or of more than
seven days, and characters that cannot be printed."""

load_all_checks()
schema = schemathesis.openapi.from_dict(describe(), config=SchemathesisConfig.from_dict({}))


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server on a cluster in memory where much is wrong, in a thread of its own."""
    token = tmp_path_factory.mktemp("http") / "token"
    token.write_text(TOKEN)
    started: Future[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        cluster = await Cluster.start()
        await trouble(cluster)
        await cluster.store.create(PATHS.recovery_delay, recovery_delay_to_bytes(30))
        async with serving(cluster, HttpSettings(token_file=str(token))) as client:
            ended = asyncio.Event()
            started.set_result((str(client.make_url("")), asyncio.get_running_loop(), ended))
            await ended.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    address, loop, ended = started.result(timeout=PATIENCE_S)
    print(f"seed {SEED}")
    yield address.rstrip("/")
    loop.call_soon_threadsafe(ended.set)
    thread.join(PATIENCE_S)


@schema.parametrize()
@hypothesis.seed(SEED)
@hypothesis.settings(
    max_examples=REQUESTS,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
def test_every_answer_is_as_described(case: schemathesis.Case[Any], url: str) -> None:
    response = case.call(base_url=url, headers=BEARER)
    excluded = []
    if "java" in (case.operation.tags or ()):
        known = {each["name"] for each in case.operation.definition.raw.get("parameters", ())}
        excluded += [*LIKE_JAVA, *(["negative_data_rejection"] if {*case.query} - known else [])]
    if response.status_code == 400 and response.text.startswith(RULES):
        excluded.append("positive_data_acceptance")
    checks: list[Any] = [CHECKS.get_one(name) for name in excluded]
    case.validate_response(response, headers=BEARER, excluded_checks=checks)


def test_every_endpoint_is_asked() -> None:
    assert sum(1 for _ in schema.get_all_operations()) == len(ENDPOINTS)
