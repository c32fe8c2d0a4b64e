"""A ledger whose last entry has a wrong digest on each bookie can be closed before that entry."""

from hashlib import sha256
from pathlib import Path

import pytest

from ledgers.digest import EntryHeader
from ledgers.model import LedgerState
from ledgers.reading import ledger_digest
from tests.cluster.commands import bookmender
from tests.cluster.our_client import abandoned, our_client
from tests.java.messages import Verdict
from tests.java.tool import JavaTool

pytest_plugins = ["tests.java.fixtures"]
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(360)]

LAST_GOOD = 4
PAYLOADS = [b"entry %d" % entry_id for entry_id in range(LAST_GOOD + 1)]


async def with_a_damaged_last_entry(uri: str) -> int:
    """Create an abandoned ledger with entries 0 to 5 and E 3, W 3, A 2.

    Entry 5 has a wrong digest on all three bookies.
    """
    writer = await abandoned(uri, PAYLOADS)
    async with our_client(uri) as client:
        digest, ledger_id = ledger_digest(writer.metadata), writer.ledger_id
        entry = digest.pack(
            ledger_id=ledger_id, entry_id=LAST_GOOD + 1, lac=LAST_GOOD, length=100, payload=b"lost"
        )
        damaged = entry[:-1] + bytes([entry[-1] ^ 1])
        assert EntryHeader.of(damaged).entry_id == LAST_GOOD + 1
        for bookie in writer.metadata.last_segment.ensemble:
            await client.bookies.add(bookie, damaged, master_key=digest.master_key)
        return ledger_id


async def state_of(uri: str, ledger_id: int) -> LedgerState:
    async with our_client(uri) as client:
        return (await client.manager.read(ledger_id)).metadata.state


async def test_java_reads_the_closed_ledger_up_to_its_new_end(
    java: JavaTool, uri: str, tmp_path: Path
) -> None:
    ledger_id = await with_a_damaged_last_entry(uri)
    command = ("ledger", "close", str(ledger_id), "--force")

    refused = await bookmender(uri, *command, "--yes", state=tmp_path)
    assert refused.exit_code == 1, refused
    assert "shows which entries would be given up" in refused.complaint
    assert await state_of(uri, ledger_id) is not LedgerState.CLOSED

    shown = await bookmender(uri, *command, "--accept-loss", state=tmp_path)
    assert shown.exit_code == 0, shown
    assert "would give up entries 5 to 5" in shown.out, shown

    closed = await bookmender(uri, *command, "--accept-loss", "--yes", state=tmp_path)
    assert closed.exit_code == 0, closed
    assert "closed, last entry 4" in closed.out

    told = await bookmender(uri, "ledger", "show", str(ledger_id))
    assert "entries 5 to 5 were given up by" in told.out

    assert java.judge(uri, [ledger_id]).verdict is Verdict.WHOLE
    read = java.read(uri, ledger_id)
    expected = sha256(b"".join(PAYLOADS)).hexdigest()
    assert (read.error, read.last, read.sha256) == (None, LAST_GOOD, expected)
