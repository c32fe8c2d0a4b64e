"""Text about a stalled change feed, for ``bookmender status`` and ``bookmender feed status``."""

from dataclasses import dataclass
from typing import Any, assert_never

from checkpoints.chain import read_chain
from checkpoints.stalls import FeedStateRecord, StallReason, read_feed_state
from daemon.words import counted, duration_text, printable
from ledgers.store import MetadataStore
from replication.znodes import ClusterPaths

DETAIL_CHARS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedStall:
    """Why an enabled feed is stalled. ``state``: None if Java's auditor leads, which writes no
    feed."""

    state: FeedStateRecord | None

    def fact(self, *, now_ms: int) -> str:
        state = self.state
        if state is None:
            return (
                "The change feed is enabled, but Java's auditor leads. It publishes nothing in it."
            )
        assert state.reason is not None
        assert state.stalled_since_ms is not None
        lasted = duration_text(max(0, now_ms - state.stalled_since_ms) / 1000)
        pending = f" {counted(state.pending_count, 'change')} wait." if state.pending_count else ""
        return (
            f"The change feed has published nothing for {lasted}: "
            f"{printable(_why(state.reason, state))}.{pending}"
        )

    def action(self) -> str:
        if self.state is None:
            return "Let a bookmender node lead, or run: bookmender feed disable"
        assert self.state.reason is not None
        return _action(self.state.reason)

    def to_json(self) -> dict[str, Any]:
        state = self.state
        return {
            "reason": "java-leads" if state is None or state.reason is None else state.reason.value,
            "since_ms": None if state is None else state.stalled_since_ms,
            "pending_count": 0 if state is None else state.pending_count,
            "detail": "" if state is None else state.detail,
            "path": None if state is None else state.path or None,
        }


def _why(reason: StallReason, state: FeedStateRecord) -> str:
    match reason:
        case StallReason.ACCESS_DENIED:
            where = f" to {state.path}" if state.path else ""
            return f"an ACL denies the leader access{where}, so changes below it are unknown"
        case StallReason.LEDGER_MAP:
            return "the leader still reads the metadata of all ledgers"
        case StallReason.WRITE_FAILED:
            detail = f": {state.detail[:DETAIL_CHARS]}" if state.detail else ""
            return f"its ledgers cannot be written or read{detail}"
        case StallReason.RESTORED:
            return "ZooKeeper's transactions are older than the feed, as after a restore"
        case StallReason.SLOW:
            return "bookies or ZooKeeper are slow, or there are too many changes"
        case _:
            assert_never(reason)


def _action(reason: StallReason) -> str:
    match reason:
        case StallReason.ACCESS_DENIED:
            return "Grant the user of bookmender's nodes read access to the directory (setAcl)."
        case StallReason.LEDGER_MAP:
            return "Nothing: wait until the leader has read all ledger metadata."
        case StallReason.WRITE_FAILED:
            return (
                "Start absent bookies, and free disk space on read-only ones. If data of the feed "
                "is lost for good: bookmender feed disable, then bookmender feed enable"
            )
        case StallReason.RESTORED:
            return (
                "Begin again: bookmender feed disable, then bookmender feed enable. Its clients "
                "compare their state with all ledgers."
            )
        case StallReason.SLOW:
            return "Check the load and the disks of bookies and ZooKeeper."
        case _:
            assert_never(reason)


async def read_stall(
    store: MetadataStore,
    paths: ClusterPaths,
    *,
    leader_session_id: int | None,
    is_java_leader: bool,
) -> FeedStall | None:
    """Return why the feed is stalled; None if it is not, is disabled, or if nothing is known.

    ``leader_session_id``: of a bookmender leader.
    """
    stored = await read_chain(store, paths)
    if stored.value is None or not stored.value.is_enabled:
        return None
    if is_java_leader:
        return FeedStall(state=None)
    state = await read_feed_state(store, paths)
    if state is None or not state.is_stalled or state.session_id != leader_session_id:
        return None
    return FeedStall(state=state)
