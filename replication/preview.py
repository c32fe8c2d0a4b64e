"""The dry run: what a worker would do about a ledger now. It takes no lock, writes and fences
nothing.

A dry run uses the worker's own inspection and plan. ``PlannedOutcome`` then predicts what the
copies would yield, so that no copy is promised whose entries no registered bookie has.
"""

from collections.abc import Collection
from dataclasses import dataclass

from msgspec.structs import replace

from ledgers.model import BookieId, LedgerState
from replication.cluster import ClusterView
from replication.commit import CopyResults, PlannedOutcome, simulated
from replication.inspection import Inspection, Inspector, RecoveryRequired
from replication.open_ledgers import end_doubts, held_back, must_finish_recovery
from replication.plan import Plan, Repair, plan_repair
from replication.reasons import Blocked, Facts, Reason, named
from replication.targets import TargetSelector


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """The copies that a repair of one ledger would make, and what blocks the rest. ``is_gone``: the
    ledger does not exist."""

    ledger_id: int
    plan: Plan
    is_gone: bool = False

    @property
    def repairs(self) -> tuple[Repair, ...]:
        return self.plan.repairs

    @property
    def entry_count(self) -> int:
        return sum(len(repair.entry_ids) for repair in self.repairs)

    @property
    def byte_count(self) -> int:
        """An estimate from the length in the metadata."""
        return sum(repair.byte_count for repair in self.repairs)


class Previewer:
    """Makes the dry runs of a command."""

    def __init__(
        self,
        inspector: Inspector,
        target_selector: TargetSelector,
        view: ClusterView,
        *,
        moves_misplaced: bool = False,
    ) -> None:
        """``view``: the cluster as it is, or as it would be under other orders.
        ``moves_misplaced``: move misplaced copies, as a worker does with ledgers that are marked
        for their placement."""
        self._inspector, self._target_selector, self._view = inspector, target_selector, view
        self._moves_misplaced = moves_misplaced

    async def preview(self, ledger_id: int, *, suspects: Collection[BookieId] = ()) -> Preview:
        """Return the dry run of one ledger.

        ``suspects``: bookies that are asked for every entry, because a check or fsck found bad
        copies there. Raises UnavailableError if ZooKeeper does not answer.
        """
        match await self._inspector.inspect(ledger_id, self._view, suspects=suspects):
            case None:
                return Preview(ledger_id=ledger_id, plan=Plan(), is_gone=True)
            case Blocked() as blocked:
                plan = Plan(blocked=(blocked,))
            case RecoveryRequired() as found:
                plan = await self._plan_open(found, suspects)
            case Inspection() as inspection if must_finish_recovery(inspection, suspects):
                waits = held_back(self._view.orders) or _until_recovered(inspection)
                plan = Plan(blocked=(waits,))
            case Inspection() as inspection:
                plan = foreseen(
                    plan_repair(
                        inspection,
                        self._target_selector.targets(self._view, inspection.metadata),
                        moves_misplaced=self._moves_misplaced,
                    ),
                    inspection,
                )
        return Preview(ledger_id=ledger_id, plan=plan)

    async def _plan_open(self, found: RecoveryRequired, suspects: Collection[BookieId]) -> Plan:
        """Return the plan for an open ledger: closed fragments are repaired, the rest waits."""
        closed_part = await self._inspector.inspect_closed_part(found, suspects=suspects)
        plan = Plan()
        if closed_part is not None:
            plan = plan_repair(
                closed_part, self._target_selector.targets(self._view, closed_part.metadata)
            )
            plan = foreseen(plan, closed_part)
        waits = held_back(self._view.orders) or _until_closed(found)
        return replace(plan, blocked=(*plan.blocked, waits))


def foreseen(plan: Plan, inspection: Inspection) -> Plan:
    """Return the plan with the copies that would succeed, and everything that would block."""
    planned_outcome = PlannedOutcome(inspection)
    results = CopyResults(
        inspection=inspection,
        plan=plan,
        outcomes=[planned_outcome.outcome(repair) for repair in plan.repairs],
        is_unchanged=lambda bookie: True,
        are_foreseen=True,
    )
    lasting = [
        (repair, simulated(repair, outcome, is_split=results.is_split))
        for repair, outcome in results.lasting
    ]
    return Plan(
        repairs=tuple(made for repair, made in lasting if made.entry_ids or not repair.entry_ids),
        blocked=tuple(dict.fromkeys(results.blocked)),
        untargeted=plan.untargeted,
    )


def _until_recovered(inspection: Inspection) -> Blocked:
    """Return that an unfinished recovery must be finished before anything is copied."""
    doubts = end_doubts(inspection.versioned, inspection.view) or Facts()
    return Blocked(reason=Reason.OPEN_FRAGMENT, facts=replace(doubts, is_in_recovery=True))


def _until_closed(found: RecoveryRequired) -> Blocked:
    """Return that the ledger waits for the open-ledger grace, and why its recovery may fail."""
    view = found.view
    doubts = end_doubts(found.versioned, view) or Facts()
    return Blocked(
        reason=Reason.OPEN_LEDGER_GRACE,
        facts=replace(
            doubts,
            absent=named(
                {*doubts.absent, *found.leaving} - view.available - set(doubts.decommissioned)
            ),
            draining=named([b for b in found.leaving if b in view.available]),
            lacking=named(found.lacking),
            entry_ids=() if found.first_lacking is None else (found.first_lacking,),
            is_in_recovery=found.versioned.metadata.state is LedgerState.IN_RECOVERY,
        ),
    )
