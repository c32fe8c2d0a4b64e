"""Opening a ledger: the last confirmed entry, the key, and too few answers."""

from contextlib import nullcontext
from dataclasses import replace

import pytest

from ledgers.digest import EntryDigest
from ledgers.errors import (
    DigestMismatchError,
    NoSuchEntryError,
    NoSuchLedgerError,
    UnauthorizedError,
    UnavailableError,
)
from ledgers.model import BookieId, DigestType, LedgerMetadata, LedgerState, Segment
from ledgers.quorum import Result, raise_if_denied
from ledgers.reading import OpenedLedger, Tail, ledger_digest, tail_verdict
from tests.ledgers.memory_cluster import DIGEST, LEDGER_ID, A, B, C, D, MemoryCluster
from tests.memory.bookies import Fault, Op, lac_record
from tests.replication.cluster import in_virtual_time

NO = Result[Tail](error=NoSuchEntryError("ENOENTRY"))
ERROR = Result[Tail](error=UnavailableError("EIO"))
DENIED = Result[Tail](error=UnauthorizedError("EUA"))
BAD = Result[Tail](error=DigestMismatchError("digest"))


def told(lac: int) -> Result[Tail]:
    return Result(value=Tail(lac=lac, length=10 * lac))


def ledger(
    ensemble: str = "abc", *, write_quorum: int = 3, ack_quorum: int = 2, first_entry_id: int = 0
) -> LedgerMetadata:
    return LedgerMetadata(
        ensemble_size=len(ensemble),
        write_quorum=write_quorum,
        ack_quorum=ack_quorum,
        segments=(
            Segment(
                first_entry_id=first_entry_id, ensemble=tuple(BookieId(name) for name in ensemble)
            ),
        ),
    )


@pytest.mark.compat("ParallelLedgerRecoveryTest.testRecoveryWithUnavailableBookie", verdict="same")
@pytest.mark.parametrize(
    ("results", "metadata", "lac"),
    [
        pytest.param({"a": told(4)}, ledger(), None, id="one of three could be out of date"),
        pytest.param({"a": told(4), "b": told(6)}, ledger(), 6, id="the greatest LAC counts"),
        pytest.param({"a": told(4), "b": NO}, ledger(), 4, id="a no is an answer too"),
        pytest.param({"a": NO, "b": NO}, ledger(), -1, id="nothing was ever acknowledged"),
        pytest.param({"a": told(4), "b": ERROR}, ledger(), None, id="an error is no answer"),
        pytest.param({"a": told(4), "b": BAD}, ledger(), None, id="nor is a bad digest"),
        pytest.param(
            {"a": told(4), "b": told(4)},
            ledger("abcd", write_quorum=2),
            None,
            id="two neighbours of four do not cover the other two, which may have more",
        ),
        pytest.param(
            {"a": told(4), "c": told(4)},
            ledger("abcd", write_quorum=2),
            4,
            id="two opposite ones of four touch every write set",
        ),
        pytest.param(
            {"a": NO, "b": told(7)},
            ledger(first_entry_id=10),
            9,
            id="never below the end of the segment before",
        ),
        pytest.param({"a": told(4)}, ledger(ack_quorum=3), 4, id="A 3: any bookie would know"),
        pytest.param(
            {"a": told(4), "b": told(5)},
            ledger(ack_quorum=1),
            None,
            id="A 1: the third may know more",
        ),
    ],
)
def test_a_covering_set_of_replies_gives_the_lac(
    results: dict[BookieId, Result[Tail]], metadata: LedgerMetadata, lac: int | None
) -> None:
    tail = tail_verdict(results, metadata)

    assert (None if tail is None else tail.lac) == lac


def test_a_distrusted_bookie_covers_nothing_but_its_lac_counts() -> None:
    """It may have lost entries; those it returns are good."""
    results = {A: told(9), B: NO, C: told(4)}
    metadata = ledger()
    metadata = metadata.with_segment(Segment(first_entry_id=0, ensemble=(A, B, C)))

    assert tail_verdict({A: told(9), B: NO}, metadata, distrusted={A}) is None
    assert tail_verdict(results, metadata, distrusted={A}) == Tail(lac=9, length=90)


def test_of_equal_lacs_the_first_reply_gives_the_length() -> None:
    results = {
        BookieId("a"): Result(value=Tail(lac=3, length=40)),
        BookieId("b"): Result(value=Tail(lac=3, length=50)),
    }

    assert tail_verdict(results, ledger()) == Tail(lac=3, length=40)


WITHOUT_KEY = replace(ledger(), metadata_version=1, digest_type=None, password=None)


@pytest.mark.parametrize(
    ("others", "metadata", "lac"),
    [
        pytest.param([told(4), NO], ledger(), 4, id="a good entry proves the key"),
        pytest.param([NO, NO], ledger(), -1, id="the key is that of the metadata"),
        pytest.param([told(4), ERROR], ledger(), None, id="the bookie itself covers nothing"),
        pytest.param([told(4), NO], WITHOUT_KEY, 4, id="a good entry proves a configured key"),
        pytest.param([NO, NO], WITHOUT_KEY, None, id="a configured key may be wrong (rule S7)"),
    ],
)
def test_a_bookie_that_denies_access_counts_as_unknown(
    others: list[Result[Tail]], metadata: LedgerMetadata, lac: int | None
) -> None:
    results = dict(zip(map(BookieId, "cab"), (DENIED, *others), strict=True))

    tail = tail_verdict(results, metadata)

    assert (None if tail is None else tail.lac) == lac


@pytest.mark.parametrize(
    ("results", "is_denied"),
    [
        pytest.param([DENIED, DENIED, DENIED], True, id="all deny access"),
        pytest.param([DENIED, NO, ERROR], True, id="no entry proves the key"),
        pytest.param([DENIED, told(4), ERROR], False, id="an entry proves the key"),
        pytest.param([NO, ERROR, ERROR], False, id="no bookie denies access"),
    ],
)
def test_the_key_is_suspect_until_an_entry_proves_it(
    results: list[Result[Tail]], is_denied: bool
) -> None:
    with pytest.raises(UnauthorizedError) if is_denied else nullcontext():
        raise_if_denied(dict(zip(map(BookieId, "abc"), results, strict=True)))


@pytest.mark.compat("BookieRecoveryTest.recoverWithoutPasswordInConf", verdict="same")
def test_the_key_of_the_metadata_comes_first() -> None:
    metadata = ledger()
    fallback = EntryDigest(DigestType.CRC32, b"configured")
    bare = LedgerMetadata(
        metadata_version=1,
        ensemble_size=1,
        write_quorum=1,
        ack_quorum=1,
        digest_type=None,
        password=None,
        segments=(),
    )

    assert ledger_digest(metadata, fallback).digest_type is DigestType.CRC32C
    assert ledger_digest(bare, fallback) is fallback
    with pytest.raises(UnauthorizedError):
        ledger_digest(bare)


def opened(cluster: MemoryCluster, opened: OpenedLedger) -> tuple[int, int]:
    assert not cluster.bookies.called("read_fencing"), "opening fences nothing"
    return opened.lac, opened.length


@in_virtual_time
async def test_an_open_ledger_ends_at_the_lac_of_its_last_entries() -> None:
    cluster = await MemoryCluster.with_ledger([A, B, C], entries=[0], on=[A, B, C])
    await cluster.put(1, A, B, C)

    assert opened(cluster, await cluster.open()) == (0, 20)
    assert (await cluster.metadata()).state is LedgerState.OPEN


@in_virtual_time
async def test_an_explicit_lac_counts_too() -> None:
    cluster = await MemoryCluster.with_ledger([A, B, C], entries=[0], on=[A, B, C])
    await cluster.put(1, A, B, C)
    for bookie in (A, B, C):
        cluster.bookies.bookie(bookie).write_lac(
            LEDGER_ID,
            master_key=DIGEST.master_key,
            record=lac_record(DIGEST, ledger_id=LEDGER_ID, lac=1),
        )

    assert opened(cluster, await cluster.open()) == (1, 20)


@in_virtual_time
async def test_bookies_with_damaged_entries_give_no_lac() -> None:
    cluster = await MemoryCluster.with_ledger([A, B, C], entries=[0], on=[A, B, C])
    for bookie in (A, B):
        cluster.bookies.bookie(bookie).corrupt(LEDGER_ID, 0)

    with pytest.raises(UnavailableError, match="digest mismatch"):
        await cluster.open()


@in_virtual_time
async def test_a_hanging_bookie_is_not_waited_for() -> None:
    cluster = await MemoryCluster.with_ledger([A, B, C], entries=[0], on=[A, B, C])
    cluster.down = {C}

    await cluster.open()

    assert cluster.clock.now_s() == 0


@in_virtual_time
async def test_too_few_answers_are_an_error_that_lists_them() -> None:
    cluster = await MemoryCluster.with_ledger([A, B, C])
    cluster.bookies.fail(B, Op.READ_LAC, Fault(error=UnavailableError))
    cluster.bookies.fail(C, Op.READ_LAC, Fault(error=UnavailableError))

    with pytest.raises(UnavailableError) as raised:
        await cluster.open()
    said = str(raised.value.context["replies"])
    assert f"{A}: neither LAC nor entry" in said
    assert f"{B}: a fault of the test" in said


@in_virtual_time
async def test_only_the_last_ensemble_is_asked() -> None:
    cluster = await MemoryCluster.with_ledger(
        [A, B, C], [A, B, D], firsts=[0, 5], entries=[4], on=[A, B, C]
    )

    assert opened(cluster, await cluster.open()) == (4, 50)
    assert {call.bookie for call in cluster.bookies.calls} == {A, B, D}


@in_virtual_time
async def test_a_closed_ledger_asks_no_bookie() -> None:
    cluster = await MemoryCluster.with_ledger(
        [A, B, C], state=LedgerState.CLOSED, last_entry_id=3, length=40
    )

    assert opened(cluster, await cluster.open()) == (3, 40)
    assert cluster.bookies.calls == []


@in_virtual_time
async def test_a_deleted_ledger_is_an_error() -> None:
    with pytest.raises(NoSuchLedgerError):
        await MemoryCluster().open()
