"""The bulk path's bytes compared with BookKeeper's, its digest checks, and its buffers."""

import itertools
from typing import Any, cast

import pytest

from ledgers.bulk.connection import RECEIVE_BYTES, BulkConnection, BulkProtocol, receive_view
from ledgers.bulk.frames import (
    BATCH_REPLY_BYTES,
    READ_REPLY,
    REPLY,
    REPLY_BYTES,
    SLACK_BYTES,
    batch_request,
    digest_check,
    read_requests,
    recovery_add_prefix,
)
from ledgers.digest import EntryDigest, master_key
from ledgers.model import DigestType
from tests.vectors import Case, cases

REQUESTS = [case for case in cases("frames_v2") if case["direction"] == "request"]
READS = [case for case in REQUESTS if case["name"] == "read"]
BATCH_READS = [case for case in REQUESTS if case["name"] == "batch read"]
ADDS = {case["name"]: case for case in REQUESTS if "flags 2" in case["name"]}


@pytest.mark.parametrize("case", READS, ids=itertools.count())
def test_read_requests_are_javas(case: Case) -> None:
    golden, fields = bytes.fromhex(case["frame"]), case["fields"]

    assert read_requests(fields["ledger_id"], [fields["entry_id"]] * 2) == golden * 2


@pytest.mark.parametrize("case", BATCH_READS, ids=itertools.count())
def test_batch_requests_are_javas(case: Case) -> None:
    fields = case["fields"]

    request = batch_request(
        fields["ledger_id"],
        fields["entry_id"],
        request_id=fields["request_id"],
        count_max=fields["max_count"],
        bytes_max=fields["max_size"],
    )

    assert request == bytes.fromhex(case["frame"])


@pytest.mark.parametrize("name", ADDS)
def test_a_read_reply_becomes_javas_recovery_add(name: str) -> None:
    add = bytes.fromhex(ADDS[name]["frame"])
    entry = add[REPLY_BYTES:]
    ledger_id, entry_id = ADDS[name]["fields"]["ledger_id"], ADDS[name]["fields"]["entry_id"]
    reply = bytearray(REPLY.pack(24 + len(entry), 0x0202_0000, 0, ledger_id, entry_id) + entry)

    reply[4:REPLY_BYTES] = recovery_add_prefix(master_key(b"foobar"))

    assert reply == add


@pytest.mark.parametrize("digest_type", DigestType)
@pytest.mark.parametrize("payload", [b"", b"payload", bytes(300)], ids=len)
def test_the_fast_check_finds_every_changed_byte(digest_type: DigestType, payload: bytes) -> None:
    """The plain check of the digest finds them too."""
    digest = EntryDigest(digest_type, b"foobar")
    check = digest_check(digest)
    entry = digest.pack(ledger_id=3, entry_id=9, lac=8, length=77, payload=payload)

    for position in range(16, len(entry)):  # the ids before are compared by the caller
        for changed in (
            entry,
            entry[:position] + bytes([entry[position] ^ 0x40]) + entry[position + 1 :],
        ):
            buffer = memoryview(bytearray(REPLY_BYTES) + changed + bytes(SLACK_BYTES))
            *_, first, second = READ_REPLY.unpack_from(buffer)
            is_good = check(buffer, REPLY_BYTES, REPLY_BYTES + len(changed), first, second)
            assert is_good == digest.is_good(changed, ledger_id=3, entry_id=9), position


# --- Buffers of incomplete frames -----------------------------------------------------------------


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
