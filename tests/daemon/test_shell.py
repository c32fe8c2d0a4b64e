"""``bookmender shell``: the commands of ``bookkeeper shell``, on a cluster in memory.

``tests/cluster/test_shell.py`` compares the output with Java's.
"""

from functools import partial
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from daemon.cli import shell as shell_command
from daemon.cli.shell import shell
from daemon.operations.errors import UnknownBookieError
from daemon.operations.repair import Repaired
from daemon.settings import Settings
from ledgers.errors import RejectedError
from ledgers.model import LedgerState
from replication.znodes import lock_to_bytes, vote_to_bytes
from tests.daemon.in_memory import InMemory
from tests.replication.cluster import Cluster
from tests.replication.ledger_values import B1, B2, B3, B4
from tests.replication.nodes import PATHS

URI = "zk+hierarchical://127.0.0.1:1/ledgers"


async def three_marks(cluster: Cluster) -> None:
    await cluster.mark(B1, B2, ledger_id=3, ctime_ms=5)
    await cluster.mark(B1, ledger_id=7, ctime_ms=6)
    await cluster.mark(ledger_id=9, ctime_ms=7)
    await cluster.store.create(PATHS.lock(7), lock_to_bytes("host-a"), is_ephemeral=True)


async def two_ledgers(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B2), ledger_id=3)
    await cluster.write_ledger((B2, B3), ledger_id=4, state=LedgerState.OPEN)


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch, in_memory: InMemory) -> InMemory:
    """Return a function that runs a command on a prepared cluster."""
    monkeypatch.setenv("BOOKMENDER_METADATA_SERVICE_URI", URI)
    return partial(in_memory, shell)


@pytest.mark.parametrize("dashes", ["-", "--"])
def test_long_options_may_have_one_dash_as_in_java(on: InMemory, dashes: str) -> None:
    result, _ = on(
        "listunderreplicated",
        f"{dashes}printmissingreplica",
        f"{dashes}printreplicationworkerid",
        prepare=three_marks,
    )

    assert result.output.splitlines() == [
        *("3", "\tCtime : 5", f"\tMissingReplica : {B1}", f"\tMissingReplica : {B2}"),
        *("7", "\tCtime : 6", f"\tMissingReplica : {B1}", "\tReplicationWorkerId : host-a"),
        *("9", "\tCtime : 7", "Under replicated ledger count: 3"),
    ]


def test_a_java_file_without_a_cluster_is_named(on: InMemory, tmp_path: Path) -> None:
    java = tmp_path / "bk_server.conf"
    java.write_text("bookiePort=3181\n")

    result, _ = on("-conf", str(java), "whoisauditor")

    assert str(result.exception).startswith(f"{java}: the file has neither")


@pytest.mark.parametrize(
    ("options", "ledgers"),
    [
        pytest.param(["-missingreplica", B1], ["3", "7"], id="names a bookie"),
        pytest.param(["-mr", B2], ["3"], id="short name"),
        pytest.param(["-excludingmissingreplica", B2], ["7", "9"], id="does not name it"),
        pytest.param(["-mr", B1, "-emr", B2], ["7"], id="names one and not the other"),
        pytest.param(["-c"], [], id="count only"),
    ],
)
def test_marked_ledgers_are_chosen_by_bookie(
    on: InMemory, options: list[str], ledgers: list[str]
) -> None:
    result, _ = on("listunderreplicated", *options, prepare=three_marks)

    assert [line for line in result.output.splitlines() if line.isdigit()] == ledgers


def test_the_auditor_is_shown(on: InMemory) -> None:
    async def elect(cluster: Cluster) -> None:
        vote = f"{PATHS.election}/V_0000000001"
        await cluster.store.create(vote, vote_to_bytes(B1), is_ephemeral=True)

    assert on("whoisauditor", prepare=elect)[0].output == f"Auditor: {B1}\n"
    assert on("whoisauditor")[0].exit_code == 1


def test_without_an_option_autorecovery_is_only_shown(on: InMemory) -> None:
    async def is_disabled(cluster: Cluster) -> bool:
        return await cluster.store.exists(PATHS.disable) is not None

    result, stays_enabled = on("autorecovery", look=is_disabled)

    assert (result.output, stays_enabled) == ("Autorecovery is enabled.\n", False)
    assert on("autorecovery", "-disable", look=is_disabled)[1]
    assert not on("autorecovery", "-e", look=is_disabled)[1]


async def recovery_delay(cluster: Cluster) -> tuple[bytes, int]:
    data, stat = await cluster.store.get(PATHS.recovery_delay)
    return data, stat.version


async def delay_of_33(cluster: Cluster) -> None:
    await cluster.store.create(PATHS.recovery_delay, b"33")


def test_the_recovery_delay_is_shown_and_set(on: InMemory) -> None:
    shown, _ = on("lostbookierecoverydelay", "-get", prepare=delay_of_33)
    _, stored = on("lostbookierecoverydelay", "-s", "0", prepare=delay_of_33, look=recovery_delay)
    _, created = on("lostbookierecoverydelay", "--set", "5", look=recovery_delay)

    assert shown.output == "LostBookieRecoveryDelay value in ZK: 33\n"
    assert (stored, created) == ((b"0", 1), (b"5", 0))
    assert on("lostbookierecoverydelay", "-get")[0].exit_code == 1
    assert on("lostbookierecoverydelay")[0].exit_code == 2


def test_an_audit_is_triggered_by_writing_the_delay_again(on: InMemory) -> None:
    _, stored = on("triggeraudit", prepare=delay_of_33, look=recovery_delay)

    assert stored == (b"33", 1)


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["listunderreplicated", "-mr"], id="in marks"),
        pytest.param(["listunderreplicated", "-emr"], id="not in marks"),
        pytest.param(["recover", "-f"], id="recover"),
        pytest.param(["recover", "-f", "-l", "4"], id="recover one ledger"),
        pytest.param(["recover", "-f", "-skipOpenLedgers"], id="recover closed ledgers"),
    ],
)
def test_a_bookie_that_nothing_names_is_an_error(
    on: InMemory, repaired: list[Any], arguments: list[str]
) -> None:
    """Java prints nothing, which looks like a bookie without ledgers."""
    mistyped = B1.replace("1", "l")
    only_in_ledgers, _ = on(*arguments, B4, prepare=ledgers_of_an_unknown_b4)
    repaired.clear()

    result, _ = on(*arguments, mistyped, prepare=ledgers_of_an_unknown_b4)

    assert only_in_ledgers.exit_code == 0
    assert repaired == []
    assert isinstance(result.exception, UnknownBookieError)
    assert f"has no bookie {mistyped}." in str(result.exception)


async def ledgers_of_an_unknown_b4(cluster: Cluster) -> None:
    """Only a ledger and a mark name B4: it has no cookie."""
    await cluster.kill(B4)
    await cluster.store.delete(f"/ledgers/cookies/{B4}")
    await cluster.write_ledger((B1, B2), ledger_id=3)
    await cluster.write_ledger((B3, B4), ledger_id=4, state=LedgerState.OPEN)
    await cluster.mark(B4, ledger_id=4)


@pytest.fixture
def repaired(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record what is repaired: the ledgers and the rate."""
    calls: list[Any] = []

    def repair(settings: Settings, ledger_ids: tuple[int, ...], bookie: None) -> Repaired:
        calls.append((ledger_ids, settings.replication.bytes_per_s))
        return Repaired.of(len(ledger_ids))

    monkeypatch.setattr(shell_command, "repair_visibly", repair)
    return calls


async def ledgers_of_absent_b2(cluster: Cluster) -> None:
    await two_ledgers(cluster)
    await cluster.kill(B2)


@pytest.mark.parametrize(
    ("options", "repairs"),
    [
        pytest.param(["-f"], [((3, 4), 0)], id="all its ledgers"),
        pytest.param(["-f", "-skipOpenLedgers"], [((3,), 0)], id="closed ledgers"),
        pytest.param(["-f", "-l", "4", "-rate", "1000"], [((4,), 1000)], id="one, at a rate"),
    ],
)
def test_a_recovery_repairs_the_ledgers_of_an_absent_bookie(
    on: InMemory, repaired: list[Any], options: list[str], repairs: list[Any]
) -> None:
    result, _ = on("recover", *options, B2, prepare=ledgers_of_absent_b2)

    assert (result.exit_code, repaired) == (0, repairs)


def test_a_recovery_needs_a_yes(on: InMemory, repaired: list[Any]) -> None:
    result, _ = on("recover", B2, prepare=ledgers_of_absent_b2, input="n\n")

    assert (result.exit_code, repaired) == (1, [])


@pytest.mark.parametrize("option", ["-query", "--dryrun"])
def test_a_dry_run_is_answered_with_the_command_that_plans(
    on: InMemory, repaired: list[Any], option: str
) -> None:
    result, _ = on("recover", option, f"{B1},{B2}", prepare=two_ledgers)

    assert (result.exit_code, repaired) == (2, [])
    assert f"bookmender plan --bookie {B2}" in result.output


def test_a_registered_bookie_is_not_recovered(on: InMemory, repaired: list[Any]) -> None:
    result, _ = on("recover", "-f", B2, prepare=two_ledgers)

    assert isinstance(result.exception, RejectedError)
    assert "bookmender bookie drain" in str(result.exception)
    assert repaired == []


def test_a_stopped_bookie_is_decommissioned(on: InMemory) -> None:
    async def absent_b4(cluster: Cluster) -> None:
        await delay_of_33(cluster)
        await cluster.kill(B4)

    result, _ = on("decommissionbookie", "-bookieid", B4, prepare=absent_b4)

    assert "is decommissioned" in result.output


def test_javas_settings_name_the_cluster(
    on: InMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    java = tmp_path / "bk_server.conf"
    java.write_text("zkServers=zk1:2181,zk2:2181\nzkLedgersRootPath=/bk\n")
    seen: list[str] = []

    def run_with(settings: Settings, action: object) -> None:
        seen.append(settings.metadata_service_uri)

    monkeypatch.setattr(shell_command, "run_with", run_with)
    CliRunner().invoke(shell, ["-conf", str(java), "triggeraudit"])

    assert seen == ["zk://zk1:2181;zk2:2181/bk"]


def test_the_help_of_a_command_needs_no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BOOKMENDER_METADATA_SERVICE_URI", raising=False)

    for command in shell.list_commands(click.Context(shell)):
        assert CliRunner().invoke(shell, [command, "--help"]).exit_code == 0
