"""Metadata beyond 1 MiB, on servers whose jute.maxbuffer is raised as by Pulsar's start scripts."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from ledgers.codec.layout import Layout
from ledgers.errors import RejectedError
from ledgers.manager import LedgerManager
from ledgers.model import BookieId, LedgerMetadata, LedgerState, Segment
from tests.zookeeper_server import opened, running_zookeeper

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

SEGMENTS = 5_000
BOOKIES = [
    BookieId(f"bookie-{i}.bookies.pulsar-production.svc.cluster.example.internal:3181")
    for i in range(4)
]


def large_metadata() -> LedgerMetadata:
    return LedgerMetadata(
        ensemble_size=3,
        write_quorum=3,
        ack_quorum=2,
        state=LedgerState.CLOSED,
        last_entry_id=SEGMENTS,
        length=SEGMENTS,
        segments=tuple(
            Segment(first_entry_id=i, ensemble=tuple(BOOKIES[(i + j) % 4] for j in range(3)))
            for i in range(SEGMENTS)
        ),
    )


def test_metadata_beyond_the_default_limit_is_read_and_written(tmp_path: Path) -> None:
    metadata = large_metadata()

    async def run() -> None:
        async with opened(server, request_bytes_max=10_000_000) as store:
            manager = LedgerManager(store, "/ledgers", Layout.FLAT)
            made = await manager.create(7, metadata)
            assert len(made.data) > 1_048_576

            found = await manager.read(7)
            assert found.metadata == metadata
            changed = replace(metadata, length=SEGMENTS + 1)
            await manager.write(7, changed, read_as=found)

            assert (await manager.read(7)).metadata == changed
        async with opened(server) as store:
            manager = LedgerManager(store, "/ledgers", Layout.FLAT)
            found = await manager.read(7)
            assert not manager.has_room_for(found)
            with pytest.raises(RejectedError, match="request_bytes_max"):
                await manager.write(7, metadata, read_as=found)

    with running_zookeeper(tmp_path, flags=["-Djute.maxbuffer=10485760"]) as server:
        asyncio.run(run())
