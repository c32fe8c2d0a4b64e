"""BookKeeper's own HTTP paths: their handlers. ``java`` makes the answers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import structlog
from aiohttp import web

from daemon.http import java
from daemon.http.changes import WrongRequestError
from daemon.http.endpoints import (
    BOOKIE,
    JSON,
    TRUE_OR_FALSE,
    Endpoint,
    Kind,
    Shared,
    bookie_id,
    flag,
    option,
    order,
)
from daemon.operations.switch import set_recovery_delay
from ledgers.errors import BookmenderError
from ledgers.model import BookieId
from ledgers.tasks import in_daemon_thread

log = structlog.get_logger()

BOOKIES_MAX = 100
"""Bookies in one request of the path for recovery."""
DELAY_MAX_S = 2**31 - 1
"""Longest recovery delay: Java's int."""
AUTORECOVERY = "/api/v1/autorecovery"


def _object(required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [required]}


IDS = {"type": "array", "items": {"type": "integer"}}
MISSING = {
    "type": "object",
    "additionalProperties": {"type": "array", "items": {"type": "string"}},
}
HOST_NAMES = {"type": "object", "additionalProperties": {"type": ["string", "null"]}}
ENABLED = _object("enabled", enabled={"type": "boolean"}) | {"additionalProperties": False}
DELETE_COOKIE = {"enum": ["true", "false", True, False]}

java_endpoint = partial(Endpoint, kind=Kind.JAVA)


@java_endpoint(f"GET {AUTORECOVERY}/status", "Is auto-recovery enabled?", ENABLED)
async def java_status(shared: Shared, request: web.Request) -> web.Response:
    enabled = (await shared.reader.read("java_status", java.is_enabled)).value
    return _json({"enabled": enabled})


@java_endpoint(
    f"PUT {AUTORECOVERY}/status",
    "Enable or disable auto-recovery",
    ENABLED,
    option("enabled", "true or false", is_required=True, type="string", enum=["true", "false"]),
    others={400: str},
)
async def java_set_status(shared: Shared, request: web.Request) -> web.Response:
    given = request.query.get("enabled")
    if given is None:
        return web.Response(text="Param 'enabled' not found in {}", status=400)
    if given.lower() not in TRUE_OR_FALSE:
        told = f"Param 'enabled' must be true or false, not {given!r}"
        return web.Response(text=told, status=400)
    wanted = given.lower() == "true"
    return _json({"enabled": await shared.change(lambda c: java.set_enabled(c, wanted))})


@java_endpoint(
    f"GET {AUTORECOVERY}/list_under_replicated_ledger",
    "Marked ledgers; with printmissingreplica an object of their missing bookies",
    {"oneOf": [IDS, MISSING]},
    option("missingreplica", "Only ledgers that miss this bookie"),
    option("excludingmissingreplica", "Only ledgers that do not miss this bookie"),
    option("printmissingreplica", "Present: also list the missing bookies"),
    others={404: str},
)
async def java_list_marked(shared: Shared, request: web.Request) -> web.Response:
    query = request.query
    including = query.get("missingreplica", "").strip()
    excluding = query.get("excludingmissingreplica", "").strip()
    shows_missing = "printmissingreplica" in query
    if not (including or excluding or shows_missing):
        ledger_ids = (await shared.reader.read("java_marked", java.read_marked)).value
        make = partial(java.marked_text, ledger_ids)
    else:
        marks = (await shared.reader.read("java_marks", java.read_all_marks)).value
        make = partial(
            java.chosen_text,
            marks,
            including=including,
            excluding=excluding,
            shows_missing=shows_missing,
        )
    text = await in_daemon_thread(make)
    if not text:
        return web.Response(text=java.NO_LEDGERS, status=404)
    return web.Response(text=text, content_type=JSON)


@java_endpoint(f"GET {AUTORECOVERY}/who_is_auditor", "The leader", str, others={404: str})
async def java_auditor(shared: Shared, request: web.Request) -> web.Response:
    leader = (await shared.reader.read("java_auditor", java.leader)).value
    if leader is None:
        return web.Response(text=java.NO_LEADER, status=404)
    return web.Response(text=f"Auditor: {leader}")


@java_endpoint(
    f"PUT {AUTORECOVERY}/trigger_audit",
    "Audit now, and treat absent bookies as lost",
    str,
    others={404: str},
)
async def java_trigger_audit(shared: Shared, request: web.Request) -> web.Response:
    refusal = await shared.change(java.trigger_audit)
    return _refused("do operation", refusal) or web.Response(text=java.AUDIT_ASKED)


@java_endpoint(
    f"GET {AUTORECOVERY}/lost_bookie_recovery_delay", "The recovery delay", str, others={404: str}
)
async def java_delay(shared: Shared, request: web.Request) -> web.Response:
    delay_s = (await shared.reader.read("java_delay", java.recovery_delay_s)).value
    refusal = "no readable znode" if delay_s is None else ""
    return _refused("get lostBookieRecoveryDelay", refusal) or web.Response(
        text=f"lostBookieRecoveryDelay value: {delay_s}"
    )


@java_endpoint(
    f"PUT {AUTORECOVERY}/lost_bookie_recovery_delay",
    "Set the recovery delay",
    str,
    body=_object(
        "delay_seconds", delay_seconds={"type": "integer", "minimum": 0, "maximum": DELAY_MAX_S}
    ),
)
async def java_set_delay(shared: Shared, request: web.Request) -> web.Response:
    delay_s = (await order(request, dict[str, Any])).get("delay_seconds")
    if type(delay_s) is not int or not 0 <= delay_s <= DELAY_MAX_S:
        raise WrongRequestError('the body must be {"delay_seconds": SECONDS}')
    await shared.change(lambda c: set_recovery_delay(c, delay_s))
    return web.Response(text=f"Success set lostBookieRecoveryDelay to {delay_s}")


@java_endpoint(
    f"PUT {AUTORECOVERY}/decommission",
    "Have the ledgers of a stopped bookie copied; with delete_cookie, then delete its cookie",
    str,
    others={404: str},
    body=_object("bookie_src", bookie_src=BOOKIE["schema"], delete_cookie=DELETE_COOKIE),
)
async def java_decommission(shared: Shared, request: web.Request) -> web.Response:
    given = await order(request, dict[str, Any])
    bookie = bookie_id(given.get("bookie_src"))
    refusal = await _begin_decommission(shared, [bookie], given)
    return _refused("send decommission command", refusal) or web.Response(
        text=f"Success send decommission Bookie command {bookie}"
    )


@java_endpoint(
    f"PUT {AUTORECOVERY}/bookie",
    "Have the ledgers of stopped bookies copied; with delete_cookie, then delete their cookies",
    str,
    others={404: str},
    body=_object(
        "bookie_src",
        bookie_src={
            "type": "array",
            "items": BOOKIE["schema"],
            "minItems": 1,
            "maxItems": BOOKIES_MAX,
        },
        bookie_dest={"type": "array", "description": "Ignored: the placement policy chooses"},
        delete_cookie=DELETE_COOKIE,
    ),
)
async def java_recover(shared: Shared, request: web.Request) -> web.Response:
    given = await order(request, dict[str, Any])
    names = given.get("bookie_src")
    if not (isinstance(names, list) and 0 < len(names) <= BOOKIES_MAX):
        raise WrongRequestError(f"bookie_src: a list of 1 to {BOOKIES_MAX} bookie IDs")
    if not isinstance(given.get("bookie_dest", []), list):
        raise WrongRequestError("bookie_dest: a list, which is ignored")
    refusal = await _begin_decommission(shared, [bookie_id(each) for each in names], given)
    return _refused("do operation", refusal) or web.Response(text=java.RECOVERY_SENT)


@java_endpoint(
    "GET /api/v1/bookie/list_bookies",
    "Registered bookies: writable ones, or with type=ro read-only ones",
    HOST_NAMES,
    option("type", "ro: the read-only bookies"),
    option("print_hostnames", "true: with their host names"),
)
async def java_list_bookies(shared: Shared, request: web.Request) -> web.Response:
    view = (await shared.reader.read("java_bookies", java.read_view)).value
    return _json(
        java.bookies(
            view,
            read_only=request.query.get("type") == "ro",
            with_hosts=request.query.get("print_hostnames") == "true",
        )
    )


async def _begin_decommission(
    shared: Shared, bookies: Sequence[BookieId], given: dict[str, Any]
) -> str:
    """Start the work on stopped bookies. Return why that is impossible; empty if it began."""
    deletes_cookie = flag("delete_cookie", str(given.get("delete_cookie", "false")).lower())
    for bookie in bookies:
        if refusal := await shared.change(partial(java.check_stopped, bookie=bookie)):
            return refusal
    if shared.decommissioning:
        names = ", ".join(shared.decommissioning)
        return f"the work on {names} is not done. Try again when it is"
    shared.decommissioning = tuple(bookies)
    shared.start(_decommission(shared, bookies, deletes_cookie=deletes_cookie))
    return ""


async def _decommission(
    shared: Shared, bookies: Sequence[BookieId], *, deletes_cookie: bool
) -> None:
    """Work until the bookies are decommissioned, or cannot be. The work ends with the node; then
    ask again."""
    try:
        for bookie in bookies:
            await shared.change_beside(
                partial(java.decommission, bookie=bookie, deletes_cookie=deletes_cookie)
            )
    except BookmenderError as error:
        log.warning("decommission.failed", bookie=bookie, error=str(error))
    except Exception:  # a defect must not end the server
        log.exception("http.crashed", endpoint="java_decommission")
    finally:
        shared.decommissioning = ()


def _refused(doing: str, refusal: str) -> web.Response | None:
    """Return Java's answer to an operation that failed; None without a refusal."""
    return web.Response(text=f"Exception when {doing}.{refusal}", status=404) if refusal else None


def _json(value: Any) -> web.Response:
    return web.Response(text=java.to_json(value), content_type=JSON)
