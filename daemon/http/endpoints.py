"""What an endpoint is, and what its handlers share.

``Endpoint`` puts the path, the access, the parameters and the types of the answers beside a
handler, in ``api`` and ``java_paths``. The routes (``app``), the description of the API
(``openapi``) and the tables of docs/http.md (``paths_page``) are made of ``ENDPOINTS``.
"""

from __future__ import annotations

import asyncio
import enum
import socket
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import msgspec
from aiohttp import web

from daemon.admin_session import AdminSession
from daemon.http.changes import WrongRequestError
from daemon.http.cluster_reader import ClusterReader, OpenCluster, Read
from daemon.http.metrics import MetricsText
from daemon.role_state import NodeService
from daemon.settings import Settings
from ledgers.clock import SystemClock
from ledgers.codec.registration import parse_bookie_id
from ledgers.errors import CorruptionError
from ledgers.model import BookieId
from ledgers.typed import convert

T = TypeVar("T")
Start = Callable[[Coroutine[Any, Any, None]], object]
Handler = Callable[["Shared", web.Request], Awaitable[Any]]
JSON = "application/json"
TRUE_OR_FALSE = ("true", "false")


class Kind(enum.Enum):
    """The kind of an endpoint. The values are labels of metrics and tags of the description."""

    METRICS = "metrics"
    HEALTH = "health"
    API = "api"
    JAVA = "java"


Parameter = Mapping[str, Any]
"""A parameter of the query or of the path, as OpenAPI describes it."""


def option(name: str, about: str, *, is_required: bool = False, **schema: Any) -> dict[str, Any]:
    """Return a parameter of the query. ``schema``: without one it is a text."""
    return {
        "name": name,
        "in": "query",
        "description": about,
        "required": is_required,
        "schema": schema or {"type": "string"},
    }


BOOKIE = option(
    "bookie",
    "Bookie ID, for example 10.0.0.1:3181",
    is_required=True,
    type="string",
    pattern="^[A-Za-z0-9:._-]+$",
) | {"in": "path"}


class Endpoint:
    """One method of one path. As a decorator it registers the handler of ``request``.

    ``answers``: by status code, the type of the JSON answer, ``str`` for a text, or a schema. The
    errors that all endpoints of ``/api`` have are added by ``openapi``.
    ``body``: the type or the schema of the request's JSON, which may be missing unless it has
    required keys.
    """

    def __init__(
        self,
        request: str,
        about: str,
        answer: Any,
        *parameters: Parameter,
        name: str = "",
        kind: Kind = Kind.API,
        body: Any = None,
        others: Mapping[int, Any] | None = None,
    ) -> None:
        """``request``: method and path. ``answer``: of the status 200. ``others``: the answers of
        other statuses. ``name``: if it is not the name of the handler."""
        self.method, self.path = request.split(" ")
        self.about, self.name, self.kind, self.body = about, name, kind, body
        self.answers = {200: answer, **(others or {})}
        self.parameters = (BOOKIE, *parameters) if "{bookie}" in self.path else parameters
        self.changes = self.method != "GET"
        """It changes the cluster, and needs the token."""
        self.is_limited = kind in (Kind.API, Kind.JAVA)
        """Access is checked, and it counts as a request at work."""

    def __call__(self, handler: Handler) -> Handler:
        """Register the handler, which returns a response, JSON as bytes, or a value that becomes
        JSON."""
        self.handler = handler
        self.name = self.name or handler.__name__
        ENDPOINTS.append(self)
        return handler


ENDPOINTS: list[Endpoint] = []


def serves(path: str, about: str, answer: Any) -> Callable[[Read], Read]:
    """Serve what a function reads from the cluster, as JSON."""

    def register(read: Read) -> Read:
        name = path.rpartition("/")[2]

        async def handler(shared: Shared, request: web.Request) -> bytes:
            return await (await shared.reader.read(name, read)).json(name, lambda value: value)

        Endpoint(f"GET {path}", about, answer, name=name)(handler)
        return read

    return register


def serve_change(
    request: str, about: str, answer: Any, change: Callable[..., Awaitable[Any]], body: Any = None
) -> None:
    """Serve a function that changes the cluster. It is given the session, the bookie if the path
    names one, and the body if there is one."""

    async def handler(shared: Shared, request: web.Request) -> Any:
        bookie = request.match_info.get("bookie")
        given = [] if bookie is None else [bookie_id(bookie)]
        if body is not None:
            given.append(await order(request, body))
        return await shared.change(lambda cluster: change(cluster, *given))

    Endpoint(request, about, answer, name=change.__name__, body=body)(handler)


class Shared:
    """What the handlers share."""

    def __init__(
        self,
        settings: Settings,
        roles: Sequence[NodeService],
        *,
        reader: ClusterReader,
        open_cluster: OpenCluster,
        start: Start,
    ) -> None:
        """``open_cluster``: opens a session for one change. ``start``: starts work that goes on
        after its request."""
        self.settings = settings
        self.roles = roles
        self.reader = reader
        self.start = start
        self.metrics_text = MetricsText([each.state for each in roles])
        self.started_ms = SystemClock().wall_ms()
        self.decommissioning: tuple[BookieId, ...] = ()
        self._open_cluster = open_cluster
        self._changing = asyncio.Lock()

    async def change(self, change: Callable[[AdminSession], Awaitable[T]]) -> T:
        """Run a change in a session of its own, after the previous one."""

        async def changed() -> T:
            async with self._changing:
                return await self._in_session(change)

        return await self.reader.on_thread(changed())

    async def change_beside(self, change: Callable[[AdminSession], Awaitable[T]]) -> T:
        """Run a change that takes long, beside others."""
        return await self.reader.on_thread(self._in_session(change))

    async def _in_session(self, change: Callable[[AdminSession], Awaitable[T]]) -> T:
        """Run the change in a session whose orders the history shows as given over HTTP to this
        host. Readings from before are forgotten."""
        try:
            async with self._open_cluster() as cluster:
                return await change(replace(cluster, by=f"http@{socket.gethostname()}"))
        finally:
            self.reader.forget()


# --- What a request contains ----------------------------------------------------------------------


async def order(request: web.Request, kind: type[T]) -> T:
    """Return the body of the request. An empty one is an empty object. Raises WrongRequestError."""
    try:
        given = msgspec.json.decode(await request.read() or b"{}")
        if isinstance(given, dict):  # JSON knows one kind of number: 60.0 is the integer 60
            given = {
                key: int(value) if isinstance(value, float) and value.is_integer() else value
                for key, value in given.items()
            }
        return cast(T, convert(given, kind))
    except (ValueError, RecursionError) as error:  # deep nesting is a RecursionError
        raise WrongRequestError(f"the body is wrong: {error}") from error


def bookie_id(given: object) -> BookieId:
    """Return the bookie ID that a request names. Raises WrongRequestError."""
    try:
        return parse_bookie_id(str(given or ""))
    except CorruptionError as error:
        raise WrongRequestError("the request names no bookie ID, as in 10.0.0.1:3181") from error


def flag(name: str, given: str) -> bool:
    """Return the value of a switch. Raises WrongRequestError."""
    if given not in TRUE_OR_FALSE:
        raise WrongRequestError(f"{name}: true or false")
    return given == "true"
