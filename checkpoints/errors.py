"""Errors of the feed that its clients handle: they open it again."""

from __future__ import annotations

from ledgers.errors import BookmenderError, ConflictError


class FeedChangedError(ConflictError):
    """An operator disabled the feed or enabled it again, or a node began it again after a loss or a
    restore of ZooKeeper. ``lost_ledger_id``: the lost ledger; else None."""

    lost_ledger_id: int | None = None


class PositionUnknownError(FeedChangedError):
    """A client has followed checkpoints that the log does not have, so ZooKeeper was restored from
    a backup. Opened again, the client begins again, without its receipts."""

    def __init__(self, **context: object) -> None:
        super().__init__(
            "this client has followed checkpoints that the feed does not have, as after a restore "
            "of ZooKeeper from a backup. It begins again",
            **context,
        )


class RestoredError(BookmenderError):
    """ZooKeeper was restored from a backup: it has handed out a number a second time."""
