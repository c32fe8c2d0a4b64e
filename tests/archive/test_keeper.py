"""The node that archives says how far the archive is."""

import asyncio
from contextlib import nullcontext

from archive.keeper import CHECK_S, ArchiveKeeper
from archive.order import ArchiveOrder, ArchiveState, read_state
from archive.places import Place
from ledgers.errors import UnavailableError
from tests.archive.places import at_once
from tests.checkpoints.feed_cluster import PATHS, FeedCluster
from tests.virtual_time import run


def test_what_is_archived_stays_known_while_the_place_cannot_be_opened() -> None:
    def no_place(url: str) -> Place:
        raise UnavailableError("no such bucket")

    async def scenario() -> None:
        cluster = FeedCluster()
        await cluster.prepare()
        order = ArchiveOrder(url="s3://bucket", since_ms=1)
        state = ArchiveState(node="a", url=order.url, written_ms=2, archived_ms=3, number=4)
        await cluster.store.create(PATHS.archive, order.to_json(), with_parents=True)
        await cluster.store.create(PATHS.archive_state, state.to_json())
        keeper = ArchiveKeeper(
            store=cluster.store,
            manager=cluster.manager,
            paths=PATHS,
            clock=cluster.clock,
            node="b",
            leads=lambda: False,
            open_bookies=lambda: nullcontext(cluster.bookies),
            place_of=no_place,
            in_thread=at_once,
        )
        task = asyncio.create_task(keeper.run())
        await cluster.clock.sleep(CHECK_S)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

        found = await read_state(cluster.store, PATHS, order)

        assert found is not None
        assert (found.node, found.error) == ("b", "no such bucket")
        assert (found.archived_ms, found.number) == (3, 4)

    run(scenario())
