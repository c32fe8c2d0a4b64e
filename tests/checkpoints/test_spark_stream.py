"""Options and rows of the feed as a stream of Spark."""

from __future__ import annotations

import pickle
from decimal import Decimal

import pytest

from checkpoints.batches import LedgerChange
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
