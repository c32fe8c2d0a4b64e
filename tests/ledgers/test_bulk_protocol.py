"""The buffers of incomplete frames: no length is believed before it is checked."""

from typing import Any, cast

import pytest

from ledgers.bulk.connection import RECEIVE_BYTES, BulkConnection, BulkProtocol, receive_view
from ledgers.bulk.frames import BATCH_REPLY_BYTES


class Judge:
    """Accepts no frame, and accepts a complete head as that of the longest possible frame."""

    def __init__(self) -> None:
        self.ends: list[int] = []

    def consume(self, view: memoryview, end: int) -> int:
        self.ends.append(end)
        return 0


def feed(inbox: BulkProtocol, data: bytes) -> None:
    inbox.get_buffer(-1)[: len(data)] = data
    inbox.buffer_updated(len(data))


@pytest.mark.parametrize("byte_count", range(4, BATCH_REPLY_BYTES))
@pytest.mark.parametrize("length", [0x7FFF_FFFF, -1])
def test_no_buffer_is_allocated_for_an_unchecked_length(byte_count: int, length: int) -> None:
    judge = Judge()
    inbox = BulkProtocol(cast("BulkConnection[Any]", judge), receive_view())
    head = length.to_bytes(4, "big", signed=True)

    feed(inbox, head + bytes(byte_count - 4))

    assert len(inbox.get_buffer(-1)) <= RECEIVE_BYTES
    more = b"more"[: BATCH_REPLY_BYTES - 1 - byte_count]  # a whole head would be given its room
    feed(inbox, more)
    assert judge.ends == [byte_count, byte_count + len(more)]


def test_a_long_frame_is_completed_in_its_own_buffer() -> None:
    inbox = BulkProtocol(cast("BulkConnection[Any]", Judge()), receive_view())

    feed(inbox, (1_000_000).to_bytes(4, "big") + bytes(BATCH_REPLY_BYTES))

    assert len(inbox.get_buffer(-1)) == 1_000_000 - BATCH_REPLY_BYTES
