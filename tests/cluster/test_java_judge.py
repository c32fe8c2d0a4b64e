"""The Java judge finds damage: a checker that finds nothing would be worthless.

The bookies here are killed and wiped, so each test checks only the ledgers that it wrote.
"""

import socket
import struct

import msgspec
import pytest
from click.testing import CliRunner

from daemon.local.cluster import LocalCluster
from daemon.local.spec import port_of
from ledgers.digest import EntryDigest
from ledgers.errors import SettingsError
from ledgers.model import BookieId, DigestType
from tests.cluster.bookies_in_trouble import expire, kill_and_expire, terminate
from tests.java import judge
from tests.java.messages import Expected, Shape, Verdict
from tests.java.tool import JavaTool, JavaWriter

pytest_plugins = ["tests.java.fixtures"]
pytestmark = pytest.mark.cluster

ENTRIES = 10
ON_EVERY_BOOKIE = Shape(ensemble_size=5, write_quorum=5, ack_quorum=5, entries=ENTRIES)


def ids(ledgers: list[Expected]) -> list[int]:
    return [each.ledger for each in ledgers]


def test_ledgers_of_every_kind_are_found_whole(java: JavaTool, uri: str) -> None:
    shapes = [
        Shape(digest="CRC32C", ensemble_size=5, write_quorum=3, entries=50),
        Shape(digest="CRC32", ensemble_size=3, write_quorum=2, ack_quorum=2, password=""),
        Shape(digest="MAC", ensemble_size=1, write_quorum=1, ack_quorum=1, sizes=(1, 1_000_000)),
        Shape(
            digest="DUMMY",
            ensemble_size=2,
            write_quorum=2,
            ack_quorum=2,
            custom={"application": "test"},
        ),
        Shape(entries=0),
    ]
    written = java.write(uri, *shapes)

    report = java.judge(uri, ids(written), expected=written)

    assert report.verdict is Verdict.WHOLE
    assert report.summary.ledgers[Verdict.WHOLE] == len(shapes)
    assert report.summary.contents[Verdict.WHOLE] == len(shapes)
    assert report.summary.copies == sum(each.entries * each.write_quorum for each in shapes)
    assert report.summary.good == report.summary.copies


@pytest.mark.long(group="java")
def test_without_a_list_every_ledger_is_judged(java: JavaTool, uri: str) -> None:
    written = java.write(uri, Shape(count=3))

    report = java.judge(uri)

    assert set(ids(written)) <= set(report.ledgers)


@pytest.mark.long(group="java")
def test_an_open_ledger_is_judged_up_to_its_last_add_confirmed(java: JavaTool, uri: str) -> None:
    with JavaWriter(uri, Shape()) as writer:
        writer.wait_acknowledged(20)
        last = writer.kill()

    report = java.judge(uri, [writer.ledger_id])

    assert report.verdict is Verdict.WHOLE
    # The LAC of the last entry is the entry before it, so one or two entries are not seen yet.
    assert last - 1 <= (report.ledgers[writer.ledger_id].entries or 0) <= last + 1


def test_every_copy_on_a_killed_bookie_is_missing(
    java: JavaTool, uri: str, module_cluster: LocalCluster
) -> None:
    (written,) = java.write(uri, ON_EVERY_BOOKIE)
    victim = module_cluster.bookies[0]
    module_cluster.kill(victim)

    report = java.judge(uri, [written.ledger])
    expire(module_cluster, victim)
    module_cluster.start_bookie(victim)
    afterwards = java.judge(uri, [written.ledger])

    ledger = report.ledgers[written.ledger]
    assert report.verdict is Verdict.MISSING
    assert ledger.problems == {"bookie-unreachable": ENTRIES}
    assert {copy.bookie for copy in ledger.examples} == {victim}
    assert afterwards.verdict is Verdict.WHOLE


@pytest.mark.long(group="java")
def test_an_absent_bookie_makes_even_an_empty_ledger_incomplete(
    java: JavaTool, uri: str, module_cluster: LocalCluster
) -> None:
    empty = msgspec.structs.replace(ON_EVERY_BOOKIE, entries=0)
    written = java.write(uri, ON_EVERY_BOOKIE, empty)
    victim = module_cluster.bookies[1]
    terminate(module_cluster, victim)

    report = java.judge(uri, ids(written))
    module_cluster.start_bookie(victim)

    assert report.summary.ledgers[Verdict.MISSING] == 2
    assert all(ledger.gone_bookies == (victim,) for ledger in report.ledgers.values())


def test_absent_and_damaged_copies_of_a_wiped_bookie_are_missing(
    java: JavaTool, uri: str, module_cluster: LocalCluster
) -> None:
    (written,) = java.write(uri, ON_EVERY_BOOKIE)
    victim = module_cluster.bookies[2]
    kill_and_expire(module_cluster, victim)
    module_cluster.wipe(victim)
    module_cluster.start_bookie(victim)
    digest = EntryDigest(DigestType.CRC32C, ON_EVERY_BOOKIE.password.encode())
    torn = bytearray(packed(digest, written.ledger, entry_id=0))
    torn[-1] ^= 1
    forged = packed(digest, written.ledger, entry_id=1)

    store(victim, bytes(torn), digest.master_key)
    store(victim, forged, digest.master_key)
    report = java.judge(uri, [written.ledger])

    problems = report.ledgers[written.ledger].problems
    assert report.verdict is Verdict.MISSING
    assert problems["digest-mismatch"] == 1
    assert problems["absent"] == ENTRIES - 2
    assert problems["differs"] >= 1, "it is unknown which payload is right"


def test_unexpected_content_is_found_though_all_copies_are_good(java: JavaTool, uri: str) -> None:
    first, second = java.write(uri, Shape(count=2))
    swapped = Expected(ledger=first.ledger, last=first.last, sha256=second.sha256)
    too_long = Expected(ledger=second.ledger, last=second.last + 1, sha256=second.sha256)

    report = java.judge(uri, ids([first, second]), expected=[swapped, too_long])

    assert report.verdict is Verdict.MISSING
    assert report.summary.ledgers[Verdict.WHOLE] == 2
    assert report.summary.contents[Verdict.MISSING] == 2


@pytest.mark.long(group="java")
def test_a_bookie_that_does_not_answer_makes_a_ledger_unknown(
    java: JavaTool, uri: str, module_cluster: LocalCluster
) -> None:
    (written,) = java.write(uri, ON_EVERY_BOOKIE)
    victim = module_cluster.bookies[3]

    module_cluster.pause(victim)
    report = java.judge(uri, [written.ledger], read_timeout_s=1)
    kill_and_expire(module_cluster, victim)
    module_cluster.start_bookie(victim)

    assert report.verdict is Verdict.UNKNOWN
    assert report.ledgers[written.ledger].problems == {"unknown": ENTRIES}


def test_a_ledger_without_metadata_is_missing(java: JavaTool, uri: str) -> None:
    report = java.judge(uri, [2**40])

    assert report.ledgers[2**40].error == "no such ledger in the metadata"
    assert report.verdict is Verdict.MISSING


# --- The command ---------------------------------------------------------------------------------


@pytest.mark.long(group="java")
def test_the_command_names_the_ledger_whose_copies_are_missing(
    java: JavaTool, uri: str, module_cluster: LocalCluster
) -> None:
    (written,) = java.write(uri, ON_EVERY_BOOKIE)
    arguments = [uri, "--ledgers", str(written.ledger)]
    victim = module_cluster.bookies[4]

    whole = CliRunner().invoke(judge.main, arguments)
    terminate(module_cluster, victim)
    command = CliRunner().invoke(judge.main, arguments)
    module_cluster.start_bookie(victim)

    assert whole.exit_code == 0, whole.output
    assert whole.stdout.splitlines()[-1] == "verdict: all copies are there"
    assert command.exit_code == 1, command.output
    assert f"ledger {written.ledger} (missing): 40 of 50 copies are good" in command.stdout
    assert command.stdout.splitlines()[-1] == "verdict: COPIES ARE MISSING"


def test_a_path_without_a_cluster_is_refused(uri: str, module_cluster: LocalCluster) -> None:
    with pytest.raises(SettingsError, match="no BookKeeper cluster"):
        judge.check_cluster(f"{uri}/elsewhere")


def test_the_layout_of_another_cluster_is_refused(uri: str) -> None:
    with pytest.raises(SettingsError, match="layout is another one: HIERARCHICAL"):
        judge.check_cluster(uri.replace("zk+hierarchical:", "zk+longhierarchical:"))


# --- A raw V2 add of any bytes, as re-replication sends it ----------------------------------------

RECOVERY_ADD = bytes.fromhex("02010002")


def packed(digest: EntryDigest, ledger_id: int, *, entry_id: int) -> bytes:
    """Return an entry with a good digest and a payload that was never written."""
    return digest.pack(
        ledger_id=ledger_id, entry_id=entry_id, lac=-1, length=100, payload=bytes(100)
    )


def store(bookie: BookieId, entry: bytes, master_key: bytes) -> None:
    packet = RECOVERY_ADD + master_key + entry
    with socket.create_connection(("127.0.0.1", port_of(bookie)), timeout=10) as connection:
        connection.sendall(struct.pack(">i", len(packet)) + packet)
        reply = connection.recv(28, socket.MSG_WAITALL)
    assert struct.unpack_from(">ii", reply, 4) == (0x02010000, 0)
