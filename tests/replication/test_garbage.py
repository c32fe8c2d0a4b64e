"""Any data in our znodes: every reader ignores garbage, and none of them fails."""

import json
import re
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest

from auditor.mark_reasons import UNREADABLE_FINDING, Finding, read_findings, read_losses
from auditor.records import StoredAbsences, read_absences, read_audit, read_drains, read_identities
from ledgers.errors import CorruptionError
from ledgers.store import Stat
from replication.client_activity import ClientActivity, read_activity
from replication.ledger_record import ClusterFingerprint, WaitingNote, WaitingNotes
from replication.marks import UrgentLedgers, read_urgent
from replication.nodes import live_nodes
from replication.orders import (
    DrainOrder,
    HoldOrder,
    LimitsOrder,
    MaintenanceWindow,
    Orders,
    OrderStore,
    drain_znode,
    hold_znode,
    limits_znode,
    maintenance_znode,
)
from replication.racks import remembered_racks
from replication.reasons import Blocked, Facts, Reason
from replication.znodes import RECORD_BYTES_MAX
from tests.memory.store import MemoryStore
from tests.replication.cluster import Cluster
from tests.replication.ledger_values import B1, B2
from tests.replication.nodes import LEDGER, PATHS, node_info

STARTED_MS = 1_700_000_000_000
"""Wall-clock time at the start of virtual time."""
Read = Callable[[MemoryStore], Awaitable[object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """The reader of one of our znodes: its good data, how it is read, and the result for
    garbage."""

    path: str
    good: bytes
    read: Read
    nothing: object


async def read_orders(store: MemoryStore) -> Orders:
    """Read the orders as nodes follow them. Unreadable ones are reported beside."""
    return replace(await OrderStore(store, PATHS).read(), unreadable=())


async def read_activity_now(store: MemoryStore) -> ClientActivity | None:
    stat = await store.exists(PATHS.activity)
    assert stat is not None
    return await read_activity(store, PATHS, now_ms=stat.mtime_ms)


async def read_hold(store: MemoryStore) -> HoldOrder | None:
    """Read the hold without its time, which for an unreadable one is that of its znode."""
    hold = (await OrderStore(store, PATHS).read()).hold
    return None if hold is None else replace(hold, since_ms=0)


NOTE = WaitingNote(
    ledger_id=LEDGER,
    blocked=Blocked(reason=Reason.NO_COPY, facts=Facts(errors=("all gone",))),
    node="host-a",
    since_ms=5,
    tries=3,
    next_try_ms=9,
    fingerprint=ClusterFingerprint(newest_czxid=5, bookies="01234567", orders="89abcdef"),
)
AUDIT = {
    "version": 1,
    "finished_ms": 1,
    "ledger_count": 2,
    "mark_count": 3,
    "unreadable_count": 1,
    "unreadable": [7],
}
ABSENCES = {
    "version": 1,
    "seen_ms": 7,
    "since_ms": {B1: 5},
    "ledger_counts": {B1: 3},
    "are_counts_complete": True,
    "excused_ms": {},
}
DRAINS = {
    "version": 1,
    "scanned_ms": 1,
    "unreadable_count": 0,
    "bookies": {
        B1: {
            "since_ms": 1,
            "ledgers_left": 2,
            "ledgers_most": 3,
            "is_drained": False,
            "is_in_doubt": True,
            "unreadable_count": 1,
            "unreadable": [7],
        }
    },
}

LOSSES = {"version": 1, "bookies": {B1: {"kind": "lost", "since_ms": 5, "ended_ms": 7}}}

ACTIVITY = ClientActivity(active=frozenset({B1}), quiet=frozenset({B2}), copying_node_count=3)

READERS = {
    "activity": Reader(
        path=PATHS.activity, good=ACTIVITY.to_json(), read=read_activity_now, nothing=None
    ),
    "a drain": Reader(
        path=drain_znode(PATHS, B1).path,
        good=DrainOrder(since_ms=5, may_fence=True).to_json(),
        read=read_orders,
        nothing=Orders(draining={B1: DrainOrder(since_ms=STARTED_MS)}),
    ),
    "a window": Reader(
        path=maintenance_znode(PATHS, B1).path,
        good=MaintenanceWindow(since_ms=1, until_ms=5, reason="new kernel").to_json(),
        read=read_orders,
        nothing=Orders(
            maintenance={B1: MaintenanceWindow.in_doubt(Stat(version=0, mtime_ms=STARTED_MS), None)}
        ),
    ),
    "limits": Reader(
        path=limits_znode(PATHS).path,
        good=LimitsOrder(bytes_per_s=1, yields_to_writers=True).to_json(),
        read=read_orders,
        nothing=Orders(),
    ),
    "a hold": Reader(
        path=hold_znode(PATHS).path,
        good=HoldOrder(since_ms=1, until_ms=5, bookies=(B1,), reason="3 of 5 went").to_json(),
        read=read_hold,
        nothing=HoldOrder.in_doubt(Stat(version=0), None),
    ),
    "the racks": Reader(
        path=PATHS.racks,
        good=json.dumps({"version": 1, "racks": {B1: "/a"}}).encode(),
        read=partial(remembered_racks, paths=PATHS),
        nothing={},
    ),
    "a note": Reader(
        path=PATHS.waiting_note(LEDGER),
        good=NOTE.to_json(),
        read=lambda store: WaitingNotes(store, PATHS).read(LEDGER),
        nothing=None,
    ),
    "the urgent": Reader(
        path=PATHS.urgent,
        good=UrgentLedgers.of([3, 4], written_ms=1).to_json(),
        read=partial(read_urgent, paths=PATHS),
        nothing=(),
    ),
    "a node": Reader(
        path=f"{PATHS.nodes}/some-uuid",
        good=node_info("host-a").to_json(),
        read=partial(live_nodes, paths=PATHS),
        nothing=[],
    ),
    "an audit": Reader(
        path=f"{PATHS.private.directory}/audit",
        good=json.dumps(AUDIT).encode(),
        read=partial(read_audit, paths=PATHS),
        nothing=None,
    ),
    "the drains": Reader(
        path=PATHS.drains,
        good=json.dumps(DRAINS).encode(),
        read=partial(read_drains, paths=PATHS),
        nothing=None,
    ),
    "the identities": Reader(
        path=PATHS.identities,
        good=json.dumps({"version": 1, "cookies": {B1: 5}}).encode(),
        read=partial(read_identities, paths=PATHS),
        nothing={},
    ),
    "the absences": Reader(
        path=PATHS.absences,
        good=json.dumps(ABSENCES).encode(),
        read=partial(read_absences, paths=PATHS),
        nothing=StoredAbsences(),
    ),
    "the losses": Reader(
        path=PATHS.losses,
        good=json.dumps(LOSSES).encode(),
        read=partial(read_losses, paths=PATHS),
        nothing={},
    ),
    "a finding": Reader(
        path=PATHS.finding(LEDGER),
        good=Finding(check="replicas", bookies=(B1,), detail="gone", found_ms=5).to_json(),
        read=partial(read_findings, paths=PATHS, ledger_ids=[LEDGER]),
        nothing={LEDGER: UNREADABLE_FINDING},
    ),
}

NO_RECORDS = {
    "nothing": b"",
    "no JSON": b"yes please",
    "not UTF-8": b"\xff\xfe{}",
    "UTF-16": '{"version": 1}'.encode("utf-16"),
    "no object": b"[1]",
    "a number": b"7",
    "null": b"null",
    "arrays without end": b"[" * 100_000,
    "arrays that end": b"[" * 100_000 + b"]" * 100_000,
    "objects without end": b'{"a":' * 100_000,
    "no number at all": b'{"version": NaN}',
    "more digits than Python reads": b'{"version": %s}' % (b"9" * 5_000),
}

STRANGE: tuple[str, ...] = (
    "1e999",
    "-1e999",
    "Infinity",
    "NaN",
    "1.5",
    "1e3",
    "-1",
    str(2**63),
    "1" + "0" * 400,
    "9" * 5_000,
    "true",
    "null",
    '"1"',
    '"\\ud800"',
    "[]",
    "[1e999]",
    "{}",
    '{"a": 1e999}',
    "[" * 500 + "]" * 500,
    "[" * 50_000 + "]" * 50_000,
)
"""Each in the place of each value of a good record, as JSON."""


async def found(reader: Reader, data: bytes) -> object:
    cluster = await Cluster.start()
    await cluster.store.create(reader.path, data, with_parents=True)
    return await reader.read(cluster.store)


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
async def test_good_records_are_read(reader: Reader) -> None:
    assert await found(reader, reader.good) != reader.nothing


@pytest.mark.parametrize("data", NO_RECORDS.values(), ids=NO_RECORDS)
@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
async def test_data_that_is_no_record_is_ignored(reader: Reader, data: bytes) -> None:
    assert await found(reader, data) == reader.nothing


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
async def test_no_value_in_a_record_breaks_a_reader(cluster: Cluster, reader: Reader) -> None:
    """Everything that is read can be written, hashed and shown."""
    await cluster.store.create(reader.path, b"", with_parents=True)
    for data in strange_records(reader.good):
        await cluster.store.set(reader.path, data, version=-1)

        read = await reader.read(cluster.store)

        repr(read).encode()
        assert not re.search(r"\binf\b", repr(read)), (data[:200], read)


@pytest.mark.parametrize("name", ["\u0663", "007", "9" * 5_000, str(2**63), "-1", "three"])
async def test_only_ledger_ids_are_names_of_notes(cluster: Cluster, name: str) -> None:
    await cluster.store.create(f"{PATHS.waiting}/{name}", with_parents=True)

    assert await WaitingNotes(cluster.store, PATHS).ledger_ids() == set()


def test_data_larger_than_any_record_is_not_parsed() -> None:
    """No znode is that large, unless ZooKeeper's bound was raised."""
    good = Finding(check="replicas", bookies=(), detail="", found_ms=5).to_json()
    assert Finding.parse(good + b" " * (RECORD_BYTES_MAX - len(good)))

    with pytest.raises(CorruptionError, match="larger"):
        Finding.parse(good + b" " * (RECORD_BYTES_MAX - len(good) + 1))


def strange_records(good: bytes) -> Iterator[bytes]:
    """Yield the good record with one value replaced, for each value and each strange one."""
    for place in _places(json.loads(good)):
        for strange in STRANGE:
            record = json.loads(good)
            _put(record, place, "@")
            yield json.dumps(record).replace('"@"', strange).encode()


def _places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in inner:
        yield (*above, key)
        if isinstance(each, dict | list):
            yield from _places(each, (*above, key))


def _put(record: Any, place: tuple[Any, ...], value: object) -> None:
    *above, last = place
    for key in above:
        record = record[key]
    record[last] = value
