"""Copies in wrong racks are found and moved; open ledgers without a writer are found and closed."""

import json
from pathlib import Path
from typing import Any

import pytest

from daemon.local.cluster import LocalCluster
from ledgers.errors import BookmenderError
from ledgers.writing import LedgerOptions
from tests.cluster.commands import Said, bookmender
from tests.cluster.our_client import our_client, sha256_of
from tests.cluster.steps import AUDITOR_ONLY, bench, errors, nodes, shape, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]
CLUSTER = {"bookies": 4}

RACKS_PATH = "/racks-of-a-test"
ON_TWO = (2, 2, 2)
LEDGERS = 12
"""With random placement, a third of these ledgers is in one rack."""
IDLE_AFTER_S = 2
PAYLOADS = [b"%d" % number for number in range(5)]


async def test_copies_in_one_rack_are_moved_to_two_racks(
    module_cluster: LocalCluster, tmp_path: Path
) -> None:
    racks = {b: "/a" if i < 2 else "/b" for i, b in enumerate(sorted(module_cluster.bookies))}
    table = {"default": {bookie: {"rack": rack} for bookie, rack in racks.items()}}
    settings = {"PLACEMENT_RACKS_ZNODE": RACKS_PATH, "CHECKS_REPAIRS_PLACEMENT": "true"}

    uri = module_cluster.metadata_service_uri
    async with bench(uri) as on, nodes(uri, tmp_path) as start:
        await on.seen.store.create(RACKS_PATH, json.dumps(table).encode())
        written = await on.write(*(shape(n, quorums=ON_TWO) for n in range(LEDGERS)))

        async def misplaced() -> list[int]:
            return [
                ledger.ledger_id
                for ledger in written
                for segment in (await on.metadata(ledger)).segments
                if len({racks[bookie] for bookie in segment.ensemble}) < 2
            ]

        assert await misplaced()
        node = start("node", settings=settings)

        async def is_done() -> bool:
            return not await misplaced() and await on.is_idle()

        await wait_for(is_done, "every ledger in two racks")
        await on.assert_whole(written)
        assert errors(node) == []


@pytest.mark.compat(
    "G35",
    verdict="better",
    why="the leader reports it, and an operator closes it under its lock, after the last "
    "acknowledged entry",
)
async def test_an_idle_open_ledger_is_found_and_closed_by_hand(
    module_cluster: LocalCluster, tmp_path: Path
) -> None:
    uri, config = module_cluster.metadata_service_uri, tmp_path / "bookmender.toml"
    settings = AUDITOR_ONLY | {"CHECKS_IDLE_OPEN_AFTER_S": str(IDLE_AFTER_S)}

    async with our_client(uri) as ours, nodes(uri, tmp_path) as start:
        async with ours.create(LedgerOptions(write_quorum=3)) as writer:
            for payload in PAYLOADS:
                await writer.add(payload)
            ledger = str(writer.ledger_id)

            refused = await bookmender(uri, "ledger", "close", ledger, "--yes", state=tmp_path)
            assert (refused.exit_code, refused.out) == (1, ""), refused
            assert "no check has seen it idle" in refused.complaint

            start("leader", settings=settings)
            found = await wait_for(lambda: listed(uri, ledger), "ledger in the list of idle ones")
            assert found["last_entry_id"] == len(PAYLOADS) - 1

            config.write_text(f"[checks]\nidle_open_after_s = {IDLE_AFTER_S}\n")
            shown = await close(uri, ledger, "-c", str(config), state=tmp_path)
            assert shown.record["doubts"] == [], shown
            assert not shown.record["has_changed"]
            closed = await close(uri, ledger, "-c", str(config), "--yes", state=tmp_path)
            assert closed.record["state"] == "CLOSED", closed
            assert closed.record["last_entry_id"] == len(PAYLOADS) - 1

            with pytest.raises(BookmenderError):  # the writer is fenced, as the command said
                await writer.add(b"too late")
        assert await ours.read(int(ledger)) == (len(PAYLOADS) - 1, sha256_of(PAYLOADS))
        assert await listed(uri, ledger) is None


async def close(uri: str, ledger: str, *options: str, state: Path) -> Said:
    said = await bookmender(uri, "ledger", "close", ledger, *options, "-o", "json", state=state)
    assert said.exit_code == 0, said
    return said


async def listed(uri: str, ledger: str) -> dict[str, Any] | None:
    said = await bookmender(uri, "ledger", "idle", "--for", f"{IDLE_AFTER_S}s", "--json")
    rows: list[dict[str, Any]] = said.record["ledgers"]
    return next((row for row in rows if row["ledger_id"] == int(ledger)), None)
