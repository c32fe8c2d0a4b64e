"""Entries that an operator gave up when a ledger was closed: ``<ur>/bookmender/given_up/<ledger
id>``.

Versioned JSON, one record a ledger, for people who ask later why a ledger ends where it does. It is
written before CLOSED, so that no entry is given up without a record; it stays.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from ledgers.store import ANY_VERSION, Check, Create, MetadataStore, MultiFailed, SetData
from replication.cluster.membership import ensure
from replication.cluster.own_state import own_path, read_record, text, time_ms, whole
from replication.queue.locks import guarded_multi


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenUpEntries:
    """From the first to the last, both inclusive. ``replies``: what bookies said of the first one.
    ``by``: the user and host of the command. ``at_ms``: wall-clock."""

    first_entry_id: int
    last_entry_id: int
    replies: str
    by: str
    at_ms: int

    def to_json(self) -> bytes:
        return json.dumps({"version": 1, **asdict(self)}).encode()

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Self:
        """Raises CorruptionError."""
        return cls(
            first_entry_id=whole(record, "first_entry_id"),
            last_entry_id=whole(record, "last_entry_id"),
            replies=text(record, "replies"),
            by=text(record, "by"),
            at_ms=time_ms(record, "at_ms"),
        )


def given_up_path(ur: str, ledger_id: int) -> str:
    return f"{own_path(ur)}/given_up/{ledger_id}"


async def read_given_up(store: MetadataStore, ur: str, ledger_id: int) -> GivenUpEntries | None:
    """None where nothing was given up, or the record cannot be read."""
    return await read_record(store, given_up_path(ur, ledger_id), GivenUpEntries.from_record)


async def record_given_up(
    store: MetadataStore,
    ur: str,
    ledger_id: int,
    entries: GivenUpEntries,
    *,
    guards: Sequence[Check],
) -> None:
    """Write the record, in place of an earlier attempt's. Raises LockLostError, UnavailableError,
    RejectedError."""
    path = given_up_path(ur, ledger_id)
    await ensure(store, path.rpartition("/")[0])
    is_there = await store.exists(path) is not None
    write = (
        SetData(path=path, data=entries.to_json(), version=ANY_VERSION)
        if is_there
        else Create(path=path, data=entries.to_json())
    )
    try:
        await guarded_multi(store, guards, [write], ledger_id=ledger_id)
    except MultiFailed as failure:
        raise failure.cause from failure
