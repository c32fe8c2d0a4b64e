"""Canned answers of the API for the page, and a server for them.

The status is made by the code of ``bookmender status``, so that the conditions are real ones.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from auditor.backlog import UnavailableLedgers
from auditor.ledger_map_updater import LedgerMapRecord
from daemon.http.access import Access
from daemon.http.page import Page
from daemon.settings import HttpSettings
from daemon.status.records import PendingLossRecord
from ledgers.clock import SystemClock
from ledgers.model import BookieId
from replication.history import Kind
from replication.ledger_record import WaitingNote
from replication.nodes import NodeInfo, Role
from replication.orders import HoldOrder
from replication.reasons import Blocked, Facts, Reason
from tests.daemon.status_values import HEALTHY, as_json, changed

MINUTE_MS = 60_000
GB = 10**9


@dataclass(slots=True, kw_only=True)
class Scene:
    """What the API answers: JSON by the last part of the path. ``error``: it answers 503 instead.
    ``age_ms``: of the state; times in ``answers`` are relative to its moment.
    ``delay_s``: of each answer."""

    answers: dict[str, Any]
    error: str | None = None
    age_ms: int = 300
    delay_s: float = 0.0

    async def answer(self, request: web.Request) -> web.Response:
        await asyncio.sleep(self.delay_s)
        if self.error is not None:
            return web.json_response({"error": self.error, "taken_ms": None}, status=503)
        moment_ms = SystemClock().wall_ms() - self.age_ms
        return web.json_response(_moved(self.answers[request.match_info["name"]], moment_ms))


def _moved(value: Any, by_ms: int) -> Any:
    """Return the answer with its times, which end in ``_ms``, moved."""
    if isinstance(value, list):
        return [_moved(each, by_ms) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        key: each + by_ms if key.endswith("_ms") and isinstance(each, int) else _moved(each, by_ms)
        for key, each in value.items()
    }


@asynccontextmanager
async def served(scene: Scene) -> AsyncIterator[str]:
    """Yield the address of the page, below a prefix as a proxy may have it."""
    inner = web.Application()
    Page(Access(HttpSettings(), observes=False)).add_to(inner)
    inner.router.add_get("/api/v1/{name}", scene.answer)

    async def handle(request: web.Request) -> web.StreamResponse:
        return await inner._handle(request.clone(rel_url=str(request.rel_url)[len("/prefix") :]))

    outer = web.Application()
    outer.router.add_get("/prefix/{rest:.*}", handle)
    async with TestServer(outer) as server:
        yield str(server.make_url("/prefix/"))


# --- Scenes ---------------------------------------------------------------------------------------


def ids(count: int) -> list[BookieId]:
    return [BookieId(f"10.0.{number // 40}.{number % 40 + 11}:3181") for number in range(count)]


def scene(
    bookies: Sequence[BookieId],
    *,
    racks: int,
    lost: Sequence[BookieId] = (),
    absent: Sequence[BookieId] = (),
    progress: dict[str, Any] | None = None,
    events: Sequence[dict[str, Any]] = (),
    **changes: Any,
) -> Scene:
    """Return a scene of a cluster with bookmender's nodes. ``changes``: of the status."""
    named = changes.pop("named_by", {})
    read_only: Sequence[BookieId] = changes.pop("read_only", ())
    gone = {*lost, *absent}
    hosts = [f"stor-{number:02}" for number in range(1, 4)]
    nodes = tuple(
        NodeInfo(role=role, host=host, pid=2211, bookie_id=None, started_ms=-26 * 60 * MINUTE_MS)
        for host in hosts
        for role in (Role.AUDITOR, Role.WORKER)
    )
    status = changed(
        HEALTHY,
        taken_ms=0,
        writable=tuple(each for each in bookies if each not in {*gone, *read_only}),
        read_only=tuple(read_only),
        lost=tuple(lost),
        absent=tuple(absent),
        nodes=nodes,
        leader=hosts[0],
        leader_node=nodes[0],
        ledger_map=LedgerMapRecord(
            session_id=1, written_ms=0, is_complete=True, ledger_count=48_231
        ),
        named_by=named,
        is_count_complete=True,
        **changes,
    )
    told = as_json(status)
    told["progress"] = progress or parts()
    rows = [
        {
            "bookie_id": each,
            "state": "lost" if each in lost else "absent" if each in absent else
            "read-only" if each in read_only else "writable",
            "lost_ms": 7 * MINUTE_MS if each in absent else None,
            "drain": None,
            "maintenance": None,
            "disk_space": {"free_bytes": 3_400 * GB, "total_bytes": 8_000 * GB},
            "rack": f"rack-{'abcdefghij'[index * racks // len(bookies)]}" if racks else None,
            "since_ms": -18 * MINUTE_MS if each in gone else None,
            "ledgers_left": named.get(each, 0) if each in gone else None,
        }
        for index, each in enumerate(bookies)
    ]  # fmt: skip
    check = {
        "about": "", "interval_s": 86_400, "is_forced": False, "running": None,
        "unreadable_records": [],
    }  # fmt: skip
    run = {"ledger_count": 48_231, "counts": {}, "ledgers_left": 0}
    return Scene(
        answers={
            "status": told,
            "bookies": {"bookies": rows, "unreadable_orders": []},
            "history": {
                "since_ms": -24 * 60 * MINUTE_MS, "events": [*EARLIER, *events], "omitted": 0,
                "unreadable_records": [],
            },
            "node": {
                "version": "0.2.0", "host": hosts[0], "pid": 2211, "mode": "repair",
                "cluster": "zk+hierarchical://zk-1:2181;zk-2:2181;zk-3:2181/ledgers",
                "roles": [],
            },
            "checks": {
                "concerns": [],
                "checks": [
                    {**check, "check": "replicas", "last": run, "last_run_ms": -200 * MINUTE_MS,
                     "next_due_ms": 1_240 * MINUTE_MS},
                    {**check, "check": "placement", "last": run, "last_run_ms": -400 * MINUTE_MS,
                     "next_due_ms": 1_040 * MINUTE_MS},
                ],
            },
        }
    )  # fmt: skip


def parts(
    *, copying: int = 0, next_: int = 0, waiting: int = 0, needs_help: int = 0, **more: Any
) -> dict[str, Any]:
    """Return the progress of a status."""
    queued = copying + next_ + waiting + needs_help
    return {
        "queued": queued, "copying": copying, "next": next_, "waiting": waiting,
        "needs_help": needs_help, "bytes_left": 0, "bytes_per_s": None, "left_s": None,
        "samples": [], **more,
    }  # fmt: skip


def event(minutes_ago: float, kind: str, text: str, node: str = "stor-01") -> dict[str, Any]:
    return {
        "node": node, "kind": kind, "at_ms": -round(minutes_ago * MINUTE_MS), "text": text,
        "ledger_id": None, "bookies": [], "cause": "",
    }  # fmt: skip


EARLIER = [
    event(1_210, Kind.LEADER_ELECTED, "became leader"),
    event(400, Kind.CHECK_FINISHED, "placement checked 48,219 ledgers: nothing found"),
    event(200, Kind.CHECK_FINISHED, "replicas checked 48,231 ledgers: nothing found"),
]


def waits(ledger_id: int, reason: Reason, absent: BookieId) -> WaitingNote:
    blocked = Blocked(reason=reason, facts=Facts(absent=(absent,), entry_count=12))
    return WaitingNote(
        ledger_id=ledger_id, blocked=blocked, node="stor-02", since_ms=-11 * MINUTE_MS
    )


def falling(most: int, left: int, minutes: int) -> list[dict[str, int]]:
    """Return the samples of a queue that becomes shorter."""
    count, growing = 60, 7
    shares = [
        min(1, (index + 4) / 10) if index < growing else 1 - (index - growing) / (count - growing)
        for index in range(count)
    ]
    return [
        {
            "at_ms": round((index - count + 1) * minutes * MINUTE_MS / count),
            "ledgers": round(most * share if index < growing else left + (most - left) * share),
            "bytes": 0,
        }
        for index, share in enumerate(shares)
    ]


def whole(count: int = 40, racks: int = 4) -> Scene:
    return scene(ids(count), racks=racks)


def one_lost(count: int = 40, racks: int = 4) -> Scene:
    """A bookie is lost, and its ledgers are being copied."""
    bookies = ids(count)
    victim = bookies[min(16, count - 1)]
    notes = [waits(each, Reason.NO_COPY, victim) for each in (18_211, 18_240, 20_007)]
    notes += [waits(each, Reason.OPEN_LEDGER_GRACE, victim) for each in (48_201, 48_230)]
    return scene(
        bookies,
        racks=racks,
        lost=[victim],
        read_only=bookies[3:4],
        named_by={victim: 1_204},
        marked_count=1_204,
        locked=frozenset(range(50_000, 50_024)),
        by_bookie=((victim, 1_204),),
        waiting=tuple(notes),
        waiting_count=len(notes),
        progress=parts(
            copying=24, next_=1_175, waiting=2, needs_help=3, bytes_left=38_200_000_000,
            bytes_per_s=45_000_000, left_s=849, samples=falling(3_120, 1_204, 17),
        ),
        events=[
            event(18, Kind.BOOKIE_LOST, f"{victim} is lost (counted as absent since 10:02:11Z)"),
            event(17.8, Kind.LEDGERS_MARKED, f"marked 3,120 ledgers: {victim} is lost"),
            event(11, Kind.LEDGER_FENCED, f"fenced open ledger 48201: {victim} is absent"),
            event(9, Kind.LEDGERS_REPAIRED, f"completed 1,916 ledgers: {victim} is lost; copied "
                  "812,400 entries, 61,044,120,000 bytes", "stor-03"),
        ],
    )  # fmt: skip


def repaired(count: int = 40, racks: int = 4) -> Scene:
    """The lost bookie of ``one_lost`` is named by no ledger any more."""
    bookies = ids(count)
    victim = bookies[min(16, count - 1)]
    return scene(
        bookies,
        racks=racks,
        lost=[victim],
        named_by={victim: 0},
        events=[
            event(52, Kind.BOOKIE_LOST, f"{victim} is lost (counted as absent since 10:02:11Z)"),
            event(51, Kind.LEDGERS_MARKED, f"marked 3,120 ledgers: {victim} is lost"),
            event(20, Kind.LEDGERS_REPAIRED, f"completed 3,120 ledgers: {victim} is lost; copied "
                  "1,322,150 entries, 99,244,120,000 bytes", "stor-03"),
            event(3, Kind.ORDER, f"bookmender bookie decommission {victim} by ops@stor-01"),
        ],
    )  # fmt: skip


def rack_lost(count: int = 40, racks: int = 4) -> Scene:
    """A whole rack is absent, and the leader began a safety hold."""
    bookies = ids(count)
    gone = [each for index, each in enumerate(bookies) if index * racks // count == 1]
    return scene(
        bookies,
        racks=racks,
        absent=gone,
        hold=HoldOrder(
            since_ms=-4 * MINUTE_MS,
            until_ms=56 * MINUTE_MS,
            bookies=tuple(gone),
            reason=f"{len(gone)} bookies of rack-b disappeared within 60 s",
        ),
        pending_losses=tuple(
            PendingLossRecord(
                bookie=each, since_ms=-4 * MINUTE_MS, lost_ms=7 * MINUTE_MS, is_excused=False
            )
            for each in gone
        ),
        named_by=dict.fromkeys(gone, 3_611),
        unavailable=UnavailableLedgers(count=212, first=(311, 402, 518), restored_by={}),
        events=[event(4, Kind.HOLD_BEGAN, f"safety hold began: {len(gone)} bookies disappeared")],
    )


def many() -> Scene:
    return one_lost(500, 10)


def muted() -> Scene:
    """As ``one_lost``, and the lost bookie is muted."""
    found = one_lost()
    for each in found.answers["status"]["conditions"]:
        is_muted = each["code"] == "BOOKIES_LOST"
        each["muted_until_ms"] = 120 * MINUTE_MS if is_muted else None
    return found
