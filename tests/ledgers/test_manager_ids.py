"""New ledger ids where the counters run out; see also ``tests/contract/test_ledger_ids.py``."""

import pytest

from ledgers.codec.layout import Layout
from ledgers.errors import UnavailableError
from ledgers.manager import LedgerManager
from tests.memory.store import MemoryStore, MemoryTree
from tests.replication.cluster import in_virtual_time

COUNTER_END = 2**31 - 1


async def new_store(*paths: str) -> tuple[MemoryTree, MemoryStore]:
    tree = MemoryTree()
    store = MemoryStore(tree)
    for path in ("/ledgers", *paths):
        await store.create(path, with_parents=True)
    return tree, store


@pytest.mark.parametrize(
    ("layout", "parent"),
    [
        pytest.param(Layout.FLAT, "/ledgers", id="flat"),
        pytest.param(Layout.LEGACY_HIERARCHICAL, "/ledgers/idgen", id="legacy"),
    ],
)
@in_virtual_time
async def test_a_layout_of_short_ids_runs_out_of_ids(layout: Layout, parent: str) -> None:
    tree, store = await new_store("/ledgers/idgen")
    tree.nodes[parent].made_count = COUNTER_END - 1

    assert await LedgerManager(store, "/ledgers", layout).new_ledger_id() == COUNTER_END - 1
    for _ in range(2):
        with pytest.raises(UnavailableError, match="no ledger id is left"):
            await LedgerManager(store, "/ledgers", layout).new_ledger_id()


@pytest.mark.parametrize("layout", [Layout.HIERARCHICAL, Layout.LONG_HIERARCHICAL])
@in_virtual_time
async def test_long_ids_begin_when_short_ones_have_run_out(layout: Layout) -> None:
    tree, store = await new_store("/ledgers/idgen")
    tree.nodes["/ledgers/idgen"].made_count = COUNTER_END - 1

    ledger_ids = [await LedgerManager(store, "/ledgers", layout).new_ledger_id() for _ in range(3)]

    assert ledger_ids == [COUNTER_END - 1, 2**32, 2**32 + 1]


@in_virtual_time
async def test_the_upper_range_follows_the_lower_one() -> None:
    kept = [f"HOB-{number:010d}" for number in (2, 3)]
    tree, store = await new_store(
        *(f"/ledgers/idgen-long/{name}" for name in ("HOB-0000000001", *kept))
    )
    tree.nodes["/ledgers/idgen-long/HOB-0000000003"].made_count = COUNTER_END

    ledger_id = await LedgerManager(store, "/ledgers", Layout.HIERARCHICAL).new_ledger_id()

    assert ledger_id == 4 * 2**32
    assert sorted(await store.children("/ledgers/idgen-long")) == [*kept, "HOB-0000000004"]
