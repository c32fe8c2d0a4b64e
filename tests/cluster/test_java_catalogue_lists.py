"""The entries that real bookies store of ledgers by Java, compared with the metadata."""

from collections.abc import Sequence

import pytest

from daemon.local.cluster import LocalCluster
from ledgers.bookies import Answer, Transfer
from ledgers.model import BookieId, Fragment, LedgerMetadata, fragments
from ledgers.reading import ledger_digest
from tests.cluster.our_client import OurClient, our_client
from tests.java.messages import Shape
from tests.java.tool import JavaTool

pytest_plugins = ["tests.java.fixtures"]
pytestmark = [pytest.mark.cluster, pytest.mark.long(group="java")]

ADMIN = "BookKeeperAdminTest"
READ = "the entries are read; bookies with DbLedgerStorage give no lists"


async def stored(client: OurClient, bookie: BookieId, ledger_id: int, count: int) -> list[int]:
    """Return which of the first ``count`` entries the bookie gives."""
    digest = ledger_digest((await client.manager.read(ledger_id)).metadata)
    result = await client.bookies.transfer(
        Transfer(ledger_id=ledger_id, digest=digest, reads={bookie: range(count)})
    )
    missing = result.failures.get(bookie, {})
    assert set(missing.values()) <= {Answer.ABSENT}, missing
    return [entry_id for entry_id in range(count) if entry_id not in missing]


def whole(ledger_id: int, metadata: LedgerMetadata, entry_count: int) -> Sequence[Fragment]:
    """Return the fragments of the ledger. An open ledger counts as closed after its last entry."""
    if not metadata.is_closed:
        metadata = metadata.closed(last_entry_id=entry_count - 1, length=0)
    return fragments(ledger_id, metadata)


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(
            Shape(ensemble_size=3, write_quorum=2, ack_quorum=2, entries=11),
            id="closed",
            marks=pytest.mark.compat(
                f"{ADMIN}.testGetListOfEntriesOfClosedLedger", verdict="other", why=READ
            ),
        ),
        pytest.param(
            Shape(ensemble_size=3, write_quorum=2, ack_quorum=2, entries=11, close=False),
            id="open",
            marks=pytest.mark.compat(
                f"{ADMIN}.testGetListOfEntriesOfNotClosedLedger",
                verdict="other",
                why=READ,
            ),
        ),
        pytest.param(
            Shape(ensemble_size=3, write_quorum=1, ack_quorum=1, entries=8),
            id="one copy of each entry",
            marks=pytest.mark.compat(
                f"{ADMIN}.testGetListOfEntriesOfLedgerWithJustOneBookieInWriteQuorum",
                verdict="other",
                why=READ,
            ),
        ),
        pytest.param(
            Shape(ensemble_size=4, write_quorum=2, ack_quorum=2, entries=1),
            id="a bookie without any entry",
            marks=pytest.mark.compat(
                f"{ADMIN}.testGetListOfEntriesOfLedgerWithEntriesNotStripedToABookie",
                verdict="other",
                why=READ,
            ),
        ),
    ],
)
async def test_every_bookie_stores_the_entries_of_its_bookie_index(
    cluster: LocalCluster, java: JavaTool, shape: Shape
) -> None:
    uri = cluster.metadata_service_uri
    (written,) = java.write(uri, shape)

    async with our_client(uri) as ours:
        metadata = (await ours.manager.read(written.ledger)).metadata
        (fragment,) = whole(written.ledger, metadata, shape.entries)
        for index, bookie in enumerate(fragment.ensemble):
            found = await stored(ours, bookie, written.ledger, shape.entries)
            assert found == list(fragment.entries_of(index))
