"""Every storage class, version and layout: a bookie dies, and Java reads every copy as good again.

Each cluster has ledgers of all digest types. Storage class, version and layout belong to a cluster:
in ``make test-all`` each pair of their values is covered, in ``make test`` three of these cases.
"""

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from daemon.local import jars
from daemon.local.cluster import LocalCluster
from daemon.local.spec import Storage, port_of
from ledgers.codec.layout import SHORT_ID_STOP, Layout, parse_layout
from ledgers.digest import master_key
from ledgers.model import BookieId, DigestType
from ledgers.writing import LedgerOptions
from tests.cluster.bookies_in_trouble import SESSION_TIMEOUT_S, kill_and_expire
from tests.cluster.conftest import MakeCluster
from tests.cluster.our_client import OurClient, our_client, sha256_of
from tests.cluster.steps import Bench, bench, errors, nodes, wait_for
from tests.java.messages import Expected, Shape, Verdict
from tests.java.tool import JavaTool
from tests.prepare import VERSIONS

pytest_plugins = ["tests.java.fixtures"]
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(360)]

CASES = [
    pytest.param(
        layout,
        storage,
        version,
        marks=() if number == other else pytest.mark.long(group="matrix"),
        id=f"{layout.name}-{storage.name}-{version}".lower(),
    )
    for number, layout in enumerate(Layout)
    for other, storage in enumerate(Storage)
    for version in [VERSIONS[(number + other) % len(VERSIONS)]]
]
"""Each pair of values. ``make test`` has each storage class and each version once."""

BOOKIES = 4
"""One more than the widest ensemble, so that the copies of the dead bookie find a target."""
WIDE, STRIPED, NARROW = (3, 3, 2), (3, 2, 2), (2, 2, 2)
"""Ensemble size, write quorum, ack quorum."""
PASSWORD = b"secret"
BEYOND_SHORT_IDS = SHORT_ID_STOP + 4_711
DAEMON = {"REPLICATION_OPEN_LEDGER_GRACE_S": "0.5", "REPLICATION_RETRY_MIN_S": "0.5"}


@pytest.mark.parametrize(("layout", "storage", "version"), CASES)
async def test_java_finds_all_copies_of_a_dead_bookie_repaired(
    layout: Layout,
    storage: Storage,
    version: str,
    make_cluster: MakeCluster,
    java: JavaTool,
    tmp_path: Path,
) -> None:
    if not jars.jars_folder(version).exists():
        pytest.skip(f"not fetched: bookmender local up --bookkeeper {version} does that")
    cluster = make_cluster(
        bookies=BOOKIES,
        bookkeeper=version,
        storage=storage,
        layout=layout,
        session_timeout_s=SESSION_TIMEOUT_S,
    )
    uri = cluster.metadata_service_uri
    assert (
        storage.java_class
        in (cluster.logs / f"bookie-{port_of(cluster.bookies[0])}.log").read_text()
    )

    by_java = await asyncio.to_thread(java.write, uri, *shapes_for_java())
    async with our_client(uri) as client:
        ours = await write_ourselves(client, layout)
        scene = await set_scene(client, cluster, open_ledger=by_java[-1], wide=ours[:2])
    written = by_java + ours
    async with bench(uri) as on, nodes(uri, tmp_path) as start:
        assert parse_layout((await on.seen.store.get("/ledgers/LAYOUT"))[0]) is layout
        node = start("node", settings=DAEMON)
        kill_and_expire(cluster, scene.victim)
        await on.mark(list(scene.refilled))
        await wait_for(lambda: is_over(on, written, scene.victim), "end of all repairs")

        assert errors(node) == []
        for ledger_id, bookie in scene.refilled.items():
            metadata = (await on.seen.manager.read(ledger_id)).metadata
            assert bookie in metadata.bookies, "it should get its missing copies"
        fenced = await on.seen.manager.read(by_java[-1].ledger)
        assert fenced.metadata.is_closed
    report = await asyncio.to_thread(java.judge, uri, expected=written)
    assert report.verdict is Verdict.WHOLE, report


def shapes_for_java() -> list[Shape]:
    """Return shapes in the order of Java's ledger ids. The last ledger stays open."""
    quorums = itertools.cycle((STRIPED, WIDE, NARROW))
    closed = [
        java_shape(next(quorums), digest=digest, sizes=sizes, seed=seed)
        for seed, (digest, sizes) in enumerate(
            itertools.product(("CRC32", "CRC32C", "MAC", "DUMMY"), ((0, 1, 100), (5_000,)))
        )
    ]
    return [
        *closed,
        java_shape(WIDE, entries=3, sizes=(900_000,)),
        java_shape(WIDE, entries=0),
        java_shape(STRIPED, digest="MAC", close=False),
        java_shape(WIDE, close=False),
    ]


def java_shape(quorums: tuple[int, int, int], **fields: Any) -> Shape:
    ensemble_size, write_quorum, _ = quorums
    return Shape(
        ensemble_size=ensemble_size,
        write_quorum=write_quorum,
        ack_quorum=write_quorum,  # otherwise copies may be missing from the start
        **{"entries": 25} | fields,
    )


async def write_ourselves(client: OurClient, layout: Layout) -> list[Expected]:
    """Write ledgers with our client. The first two are wide and closed; the last one is open."""
    written = [
        await write(client, quorums, digest_type=digest_type, metadata_version=version)
        for quorums, digest_type, version in zip(
            (WIDE, WIDE, STRIPED, NARROW), DigestType, (3, 2, 3, 2), strict=True
        )
    ]
    if layout.ledger_id_stop > BEYOND_SHORT_IDS:
        written.append(await write(client, STRIPED, ledger_id=BEYOND_SHORT_IDS))
    return [*written, await write(client, STRIPED, closes=False)]


async def write(
    client: OurClient,
    quorums: tuple[int, int, int],
    *,
    digest_type: DigestType = DigestType.CRC32C,
    metadata_version: int = 3,
    ledger_id: int | None = None,
    closes: bool = True,
) -> Expected:
    ensemble_size, write_quorum, ack_quorum = quorums
    options = LedgerOptions(
        ensemble_size=ensemble_size,
        write_quorum=write_quorum,
        ack_quorum=ack_quorum,
        digest_type=digest_type,
        password=PASSWORD,
        metadata_version=metadata_version,
    )
    payloads = [bytes([number]) * (100 + number) for number in range(30)]
    async with client.create(options, ledger_id=ledger_id) as writer:
        for payload in payloads:
            await writer.add(payload)
        if closes:
            await writer.close()
    return Expected(ledger=writer.ledger_id, last=len(payloads) - 1, sha256=sha256_of(payloads))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """``refilled``: ledgers with entries missing on a live bookie, with that bookie."""

    victim: BookieId
    refilled: Mapping[int, BookieId]


async def set_scene(
    client: OurClient, cluster: LocalCluster, *, open_ledger: Expected, wide: Sequence[Expected]
) -> Scene:
    """Choose a victim, and damage live members of the two wide ledgers.

    The victim is in the open ledger and in the wide ones. A live member of the first wide ledger
    loses all of it; a live member of the second keeps one entry. So bookies answer both that they
    have no such ledger and that they have no such entry.
    """
    manager = client.manager
    in_all = set(cluster.bookies).intersection(
        *[(await manager.read(each.ledger)).metadata.bookies for each in (open_ledger, *wide)]
    )
    victim = min(in_all)  # it exists: each of the three leaves out one of four bookies
    nothing, one_entry = [
        await misplace(client, each.ledger, cluster.bookies, victim) for each in wide
    ]
    source, target = one_entry
    entry = await client.bookies.read(source, wide[1].ledger, 7)
    await client.bookies.add(target, entry, master_key=master_key(PASSWORD), is_recovery=True)
    return Scene(victim=victim, refilled={wide[0].ledger: nothing[1], wide[1].ledger: one_entry[1]})


async def misplace(
    client: OurClient, ledger_id: int, bookies: Sequence[BookieId], victim: BookieId
) -> tuple[BookieId, BookieId]:
    """Replace a bookie other than the victim by the one that is no member, in the metadata.

    Return the bookie that was named before, and the one that is named now.
    """
    versioned = await client.manager.read(ledger_id)
    segment = versioned.metadata.last_segment
    index = next(i for i, bookie in enumerate(segment.ensemble) if bookie != victim)
    (outsider,) = set(bookies) - set(segment.ensemble)
    metadata = versioned.metadata.with_segment(segment.with_bookies({index: outsider}))
    await client.manager.write(ledger_id, metadata, read_as=versioned)
    return segment.ensemble[index], outsider


async def is_over(on: Bench, written: Sequence[Expected], victim: BookieId) -> bool:
    """Return True if no metadata names the victim, and there is no mark and no lock."""
    read = [await on.seen.manager.read(each.ledger) for each in written]
    return not any(victim in each.metadata.bookies for each in read) and await on.is_idle()
