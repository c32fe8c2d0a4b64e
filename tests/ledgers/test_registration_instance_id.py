"""The instance id of a cluster."""

import pytest

from ledgers.registration import read_instance_id
from tests.memory.store import MemoryStore, MemoryTree
from tests.virtual_time import run


@pytest.mark.parametrize(
    ("data", "known"),
    [
        pytest.param(b"3f2c-11\n", "3f2c-11", id="a UUID"),
        pytest.param(b"", None, id="nothing in it"),
        pytest.param(b"\xff", "�", id="no text: it is another cluster's all the same"),
    ],
)
def test_a_cluster_is_identified_by_its_instance_id(data: bytes, known: str | None) -> None:
    async def read() -> str | None:
        store = MemoryStore(MemoryTree())
        await store.create("/ledgers/INSTANCEID", data, with_parents=True)
        return await read_instance_id(store, "/ledgers")

    assert run(read()) == known


def test_a_cluster_without_an_instance_id_is_unknown() -> None:
    assert run(read_instance_id(MemoryStore(MemoryTree()), "/ledgers")) is None
