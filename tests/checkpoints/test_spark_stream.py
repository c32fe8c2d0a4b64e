"""Options and rows of the feed as a stream of Spark."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import pytest

from checkpoints.batches import LedgerChange, Offset
from checkpoints.chain import FeedChain, Kind, Segment
from checkpoints.model import LogId
from checkpoints.spark import SCHEMA, ChangesReader, StreamOptions, to_batch
from ledgers.errors import SettingsError

GIVEN = {"metadataServiceUri": "zk+hierarchical://zk:2181/ledgers", "client": "lake"}


def test_the_options_have_defaults() -> None:
    options = StreamOptions.parse(GIVEN)

    assert (options.client, options.store.reveal()) == ("lake", "zookeeper:")
    assert (options.from_start, options.may_lose) == (False, False)


def test_all_options_are_known() -> None:
    more = {
        "fromStart": "true",
        "failOnDataLoss": "FALSE",
        "store": "sqlite:////tmp/f",
        "security.bookie_tls": "true",
    }
    options = StreamOptions.parse(GIVEN | more)

    assert (options.from_start, options.may_lose) == (True, True)
    assert options.store.reveal() == "sqlite:////tmp/f"
    assert options.security.bookie_tls


@pytest.mark.parametrize(
    ("given", "says"),
    [
        pytest.param({"client": "lake"}, "metadataServiceUri", id="no cluster"),
        pytest.param({**GIVEN, "client": ""}, "client", id="no client"),
        pytest.param({**GIVEN, "fromStart": "yes"}, "fromStart", id="neither true nor false"),
        pytest.param(
            {**GIVEN, "security.bookie_tls": "maybe"}, "bookie_tls is 'maybe'", id="of security"
        ),
        pytest.param({**GIVEN, "metadataServiceUri": "zk"}, "zk", id="no URI"),
    ],
)
def test_wrong_options_are_refused(given: dict[str, str], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        StreamOptions.parse(given)


def test_an_executor_gets_a_reader_without_its_client() -> None:
    reader = ChangesReader(StreamOptions.parse(GIVEN))
    reader._client = object()  # type: ignore[assignment]  # stands for a thread

    copy = pickle.loads(pickle.dumps(reader))

    assert copy._client is None
    assert copy._options == reader._options


@dataclass
class OpenedClient:
    """A client of a feed whose chain is given, as the reader keeps it."""

    chain: FeedChain
    low_watermark: int = 0

    def call(self, action: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
        asyncio.run(action(self))

    @property
    def log(self) -> OpenedClient:
        return self

    async def store_low_watermark(self, checkpoint_id: int) -> None:
        self.low_watermark = checkpoint_id


@pytest.mark.parametrize(
    ("generation", "log", "watermark"),
    [
        pytest.param(5, LogId(7, 70, 10), 25, id="of the log"),
        pytest.param(5, None, 25, id="of an earlier release"),
        pytest.param(5, LogId(7, 71, 10), 0, id="of a log that a restore undid"),
        pytest.param(4, LogId(7, 70, 10), 0, id="of an earlier feed"),
    ],
)
def test_only_offsets_of_the_present_log_are_receipts(
    generation: int, log: LogId | None, watermark: int
) -> None:
    """Otherwise another query of this client would begin behind the end of the log."""
    segment = Segment(ledger_id=7, kind=Kind.LOG, previous_id=10, begun_ms=70)
    chain = FeedChain(is_enabled=True, generation=5, changed_ms=0, segments=(segment,))
    reader, client = ChangesReader(StreamOptions.parse(GIVEN)), OpenedClient(chain)
    reader._client = client  # type: ignore[assignment]  # without its thread

    reader.commit(Offset(generation=generation, checkpoint=25, log=log).to_json())

    assert client.low_watermark == watermark


def test_rows_have_the_columns_of_the_source() -> None:
    changes = [
        LedgerChange(ledger_id=7, version=2**40, time_ms=5, fingerprint=2**64 - 1),
        LedgerChange(ledger_id=8, version=9, time_ms=6, fingerprint=None),
    ]

    rows = to_batch(changes)

    assert rows.to_pylist() == [
        {
            "ledger_id": 7,
            "is_deleted": False,
            "version": 2**40,
            "time_ms": 5,
            "fingerprint": Decimal(2**64 - 1),
        },
        {"ledger_id": 8, "is_deleted": True, "version": 9, "time_ms": 6, "fingerprint": None},
    ]
    assert rows.schema == SCHEMA
