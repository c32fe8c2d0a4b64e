"""An unexpected error while one ledger is inspected: the check of all others continues."""

import pytest
from structlog.testing import capture_logs

from auditor.fsck.ledger_inspector import LedgerInspector
from auditor.fsck.verdicts import Finding, Grade, LedgerVerdict
from ledgers.errors import SessionLostError
from ledgers.manager import VersionedMetadata
from tests.fsck.inspections import inspect_many, one_ledger, told
from tests.replication.cluster import Cluster, in_virtual_time
from tests.replication.ledger_values import B1, B2, B3
from tests.replication.nodes import LEDGER


async def failing(monkeypatch: pytest.MonkeyPatch, error: Exception) -> Cluster:
    """Return a cluster in which inspecting ``LEDGER`` fails; two other ledgers are whole."""
    cluster, _ = await one_ledger()
    for ledger_id in (1, 2):
        await cluster.write_ledger((B1, B2, B3), write_quorum=3, ledger_id=ledger_id)
    look = LedgerInspector.inspect

    async def looking(
        self: LedgerInspector, versioned: VersionedMetadata, since: LedgerVerdict | None = None
    ) -> LedgerVerdict:
        if versioned.ledger_id == LEDGER:
            raise error
        return await look(self, versioned, since)

    monkeypatch.setattr(LedgerInspector, "inspect", looking)
    return cluster


@in_virtual_time
async def test_a_ledger_whose_inspection_crashes_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = await failing(monkeypatch, ZeroDivisionError("what?"))

    with capture_logs() as logs:
        found = await inspect_many(cluster, [1, LEDGER, 2])

    assert told(found[LEDGER]) == (Grade.UNKNOWN, (Finding.NOT_ANSWERED,))
    assert "ZeroDivisionError('what?')" in found[LEDGER].evidence[0].detail
    assert {found[1].grade, found[2].grade} == {Grade.WHOLE}
    assert [(each["event"], each["ledger_id"]) for each in logs] == [
        ("fsck_inspection.crashed", LEDGER)
    ]


@in_virtual_time
async def test_an_expected_error_ends_the_inspection(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = await failing(monkeypatch, SessionLostError("the session is over"))

    with pytest.raises(SessionLostError):
        await inspect_many(cluster, [LEDGER])
