"""docs/feed.md and its example, which tests/cluster/test_feed_commands.py runs, too."""

import asyncio
import re
import runpy
from pathlib import Path

import click

from checkpoints.model import Checkpoint, Span, ledger_key
from checkpoints.recovery import RecoveryService
from daemon.cli.feed import feed
from tests.memory.feed import MemoryCheckpointSource, MemoryReceipts
from tests.replication.cluster import in_virtual_time
from tests.virtual_time import LoopClock

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "feed.md").read_text()
CONTEXT = click.Context(feed)


@in_virtual_time
async def test_the_example_takes_a_bounded_number_of_changes(tmp_path: Path) -> None:
    """However slow it is, and however many ledgers change. What it did not take, it gets later."""
    example = runpy.run_path(str(DOCS / "examples" / "catalogue.py"))
    count_max = example["WAITING_MAX"]
    source = MemoryCheckpointSource()
    store = await MemoryReceipts().open("catalogue")
    await store.store_low_watermark(0)
    catalogue = example["Catalogue"](str(tmp_path / "catalogue.db"), client=None)
    async with RecoveryService.open(source, store, clock=LoopClock()) as service:
        await service.subscribe(catalogue)
        catalogue.is_subscribed = True
        spans = [Span(ledger_key(i), 0, i + 1, 7) for i in range(3 * count_max)]

        committing = asyncio.create_task(source.commit(Checkpoint(3 * count_max, 0, 1, spans)))
        await asyncio.sleep(60)
        assert len(catalogue.waiting) == count_max
        assert not committing.done()

        taken = [(await catalogue.next_change()).ledger_id for _ in spans]
        await committing
        assert taken == list(range(3 * count_max))


def test_the_page_names_options_of_the_commands() -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", PAGE)) - {"--changed", "--help"}
    commands = [feed.get_command(CONTEXT, name) for name in feed.list_commands(CONTEXT)]

    assert named <= {option for each in commands if each for p in each.params for option in p.opts}
