"""The bulk path's bytes compared with BookKeeper's, and its digest checks compared with the plain
one."""

import itertools

import pytest

from ledgers.bulk.frames import (
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
