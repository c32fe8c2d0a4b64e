"""Entries and their digests, compared with Java's."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledgers.digest import HEADER_BYTES, EntryDigest, EntryHeader, master_key
from ledgers.errors import DigestMismatchError
from ledgers.model import DigestType
from tests.memory.bookies import lac_record
from tests.vectors import Case, cases

PROVING = [DigestType.CRC32, DigestType.CRC32C, DigestType.HMAC]
"""The digest types that prove something; DUMMY proves nothing."""

DIGEST_TYPES = pytest.mark.parametrize("digest_type", DigestType, ids=lambda kind: kind.name)
INT64 = st.integers(-(2**63), 2**63 - 1)


def _digest(case: Case) -> EntryDigest:
    digest_type = DigestType[case["digest_type"].replace("MAC", "HMAC")]
    return EntryDigest(digest_type, bytes.fromhex(case["password"]))


def _name(case: Case) -> str:
    return f"{case['digest_type']}-{case['password'][:8]}-{case['ledger_id']}"


# --- as Java --------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", cases("master_keys"), ids=lambda case: case["password"][:8])
def test_the_master_key_comes_from_the_password(case: Case) -> None:
    password = bytes.fromhex(case["password"])

    assert master_key(password).hex() == case["master_key"]


@DIGEST_TYPES
def test_the_master_key_does_not_depend_on_the_digest_type(digest_type: DigestType) -> None:
    assert EntryDigest(digest_type, b"foobar").master_key == master_key(b"foobar")


@pytest.mark.parametrize("case", cases("entries"), ids=_name)
def test_an_entry_is_packed_as_java_packs_it(case: Case) -> None:
    packed = _digest(case).pack(
        ledger_id=case["ledger_id"],
        entry_id=case["entry_id"],
        lac=case["last_add_confirmed"],
        length=case["length"],
        payload=bytes.fromhex(case["payload"]),
    )

    assert packed.hex() == case["entry"]


@pytest.mark.parametrize("view", [bytes, memoryview])
@pytest.mark.parametrize("case", cases("entries"), ids=_name)
def test_an_entry_of_java_is_good(case: Case, view: type[bytes] | type[memoryview]) -> None:
    digest, entry = _digest(case), view(bytes.fromhex(case["entry"]))
    ledger_id, entry_id = case["ledger_id"], case["entry_id"]

    assert digest.is_good(entry, ledger_id=ledger_id, entry_id=entry_id)
    assert digest.is_good(entry, ledger_id=ledger_id, entry_id=-1)
    assert EntryHeader.of(entry) == EntryHeader(
        ledger_id=ledger_id,
        entry_id=entry_id,
        lac=case["last_add_confirmed"],
        length=case["length"],
    )


@pytest.mark.parametrize("case", cases("entries"), ids=_name)
def test_the_payload_follows_the_digest(case: Case) -> None:
    assert _digest(case).payload(bytes.fromhex(case["entry"])).hex() == case["payload"]


@pytest.mark.parametrize("case", cases("lac_records"), ids=_name)
def test_an_explicit_lac_record_is_read_and_written_as_java_does(case: Case) -> None:
    digest, record = _digest(case), bytes.fromhex(case["record"])
    ledger_id, lac = case["ledger_id"], case["last_add_confirmed"]

    assert lac_record(digest, ledger_id=ledger_id, lac=lac) == record
    assert digest.lac_of_record(record, ledger_id=ledger_id) == lac


# --- Damaged or foreign entries -------------------------------------------------------------------


def _entry(digest: EntryDigest) -> bytes:
    return digest.pack(ledger_id=1, entry_id=2, lac=1, length=15, payload=b"hello")


@pytest.mark.parametrize("digest_type", PROVING, ids=lambda kind: kind.name)
def test_any_change_of_a_single_byte_is_detected(digest_type: DigestType) -> None:
    digest = EntryDigest(digest_type, b"foobar")
    entry = _entry(digest)

    undetected = [
        (position, change)
        for position in range(len(entry))
        for change in range(1, 256)
        if digest.is_good(_changed(entry, position, change), ledger_id=1, entry_id=2)
    ]

    assert undetected == []


def test_dummy_detects_only_that_it_is_another_entry() -> None:
    digest = EntryDigest(DigestType.DUMMY, b"foobar")
    entry = _entry(digest)

    detected = [
        position
        for position in range(len(entry))
        if not digest.is_good(_changed(entry, position, 1), ledger_id=1, entry_id=2)
    ]

    assert detected == list(range(16))


def _changed(data: bytes, position: int, change: int) -> bytes:
    return data[:position] + bytes([data[position] ^ change]) + data[position + 1 :]


@pytest.mark.parametrize("digest_type", PROVING, ids=lambda kind: kind.name)
def test_any_truncation_and_any_surplus_is_detected(digest_type: DigestType) -> None:
    digest = EntryDigest(digest_type, b"foobar")
    entry = _entry(digest)

    others = [entry[:length] for length in range(len(entry))] + [entry + b"\x00"]

    assert not any(digest.is_good(other, ledger_id=1, entry_id=2) for other in others)


@DIGEST_TYPES
def test_too_few_bytes_for_header_and_digest_are_no_entry(digest_type: DigestType) -> None:
    digest = EntryDigest(digest_type, b"")
    empty = digest.pack(ledger_id=0, entry_id=0, lac=0, length=0, payload=b"")

    assert len(empty) == HEADER_BYTES + digest.size
    for length in range(len(empty)):
        assert not digest.is_good(empty[:length], ledger_id=0, entry_id=0)
        with pytest.raises(DigestMismatchError):
            digest.check(empty[:length], ledger_id=0, entry_id=0)


@DIGEST_TYPES
@pytest.mark.parametrize(
    ("ledger_id", "entry_id"),
    [
        pytest.param(1, 3, id="another entry"),
        pytest.param(2, 2, id="another ledger"),
        pytest.param(2, -1, id="another ledger's last entry"),
    ],
)
def test_another_entry_than_requested_is_a_mismatch(
    digest_type: DigestType, ledger_id: int, entry_id: int
) -> None:
    digest = EntryDigest(digest_type, b"foobar")

    with pytest.raises(DigestMismatchError):
        digest.check(_entry(digest), ledger_id=ledger_id, entry_id=entry_id)


@pytest.mark.parametrize("other_type", PROVING, ids=lambda kind: kind.name)
@DIGEST_TYPES
def test_another_digest_type_is_a_mismatch(digest_type: DigestType, other_type: DigestType) -> None:
    entry = _entry(EntryDigest(digest_type, b"foobar"))

    is_good = EntryDigest(other_type, b"foobar").is_good(entry, ledger_id=1, entry_id=2)

    assert is_good is (other_type is digest_type)


@DIGEST_TYPES
def test_another_password_matters_to_hmac_only(digest_type: DigestType) -> None:
    entry = _entry(EntryDigest(digest_type, b"foobar"))

    is_good = EntryDigest(digest_type, b"other").is_good(entry, ledger_id=1, entry_id=2)

    assert is_good is (digest_type is not DigestType.HMAC)


@pytest.mark.parametrize("digest_type", PROVING, ids=lambda kind: kind.name)
def test_any_change_of_a_lac_record_is_detected(digest_type: DigestType) -> None:
    digest = EntryDigest(digest_type, b"foobar")
    record = lac_record(digest, ledger_id=1, lac=7)
    damaged = [_changed(record, position, 1) for position in range(len(record))]
    cut = [record[:length] for length in range(len(record))]

    for other in [*damaged, *cut, record + b"\x00"]:
        with pytest.raises(DigestMismatchError):
            digest.lac_of_record(other, ledger_id=1)


@DIGEST_TYPES
def test_a_lac_record_of_another_ledger_is_a_mismatch(digest_type: DigestType) -> None:
    digest = EntryDigest(digest_type, b"foobar")
    record = lac_record(digest, ledger_id=1, lac=7)

    with pytest.raises(DigestMismatchError):
        digest.lac_of_record(record, ledger_id=2)


# --- any entry, any bytes -------------------------------------------------------------------------


@DIGEST_TYPES
@given(
    password=st.binary(max_size=20),
    ledger_id=INT64,
    entry_id=INT64,
    lac=INT64,
    length=INT64,
    payload=st.binary(max_size=200),
)
def test_any_entry_can_be_read_again(
    digest_type: DigestType,
    password: bytes,
    ledger_id: int,
    entry_id: int,
    lac: int,
    length: int,
    payload: bytes,
) -> None:
    digest = EntryDigest(digest_type, password)

    entry = digest.pack(
        ledger_id=ledger_id, entry_id=entry_id, lac=lac, length=length, payload=payload
    )

    header = digest.check(entry, ledger_id=ledger_id, entry_id=entry_id)
    assert header == EntryHeader(ledger_id=ledger_id, entry_id=entry_id, lac=lac, length=length)
    assert digest.payload(entry) == payload


@DIGEST_TYPES
@given(data=st.binary(max_size=80))
def test_garbage_is_refused_in_the_documented_way(digest_type: DigestType, data: bytes) -> None:
    digest = EntryDigest(digest_type, b"")

    with suppress(DigestMismatchError):
        digest.check(data, ledger_id=0, entry_id=-1)
    with suppress(DigestMismatchError):
        digest.lac_of_record(data, ledger_id=0)
    with suppress(DigestMismatchError):
        EntryHeader.of(data)
