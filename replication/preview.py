"""What a worker would do about a ledger now: looked at and planned by its own code, and left at
that.

What comes of the plan is foreseen (``planned_outcome``) by the code that decides what the worker writes:
no copy is promised of which no bookie that is there has the entries.
"""

from collections.abc import Collection
from dataclasses import dataclass

from msgspec.structs import replace

from ledgers.manager import VersionedMetadata
from ledgers.model import BookieId, LedgerState
from replication.cluster import ClusterView
from replication.commit import CopyResults, PlannedOutcome, simulated
from replication.inspection import Inspection, Inspector, RecoveryRequired
from replication.open_ledgers import end_doubts, held_back, is_to_be_ended
from replication.plan import Plan, Repair, plan_repair
from replication.reasons import Blocked, Reason
from replication.targets import TargetSelector


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """What would be copied of one ledger, and what is in the way. ``is_gone``: there is no such
    ledger (any more)."""

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
        """A guess, from what the metadata says of the ledger's length."""
        return sum(repair.byte_count for repair in self.repairs)


class Previewer:
    """Takes no lock, writes and fences nothing. One for a command."""

    def __init__(
        self,
        inspector: Inspector,
        target_selector: TargetSelector,
        view: ClusterView,
        *,
        moves_misplaced: bool = False,
    ) -> None:
        """``view`` may be what is, or what would be under other orders. ``moves_misplaced``: as a
        worker does with ledgers that are marked for their placement."""
        self._inspector, self._target_selector, self._view = inspector, target_selector, view
        self._moves_misplaced = moves_misplaced

    async def preview(self, ledger_id: int, *, suspects: Collection[BookieId] = ()) -> Preview:
        """``suspects``: bookies to be asked for every entry, as a worker asks those that a check
        or fsck found bad.

        Raises UnavailableError when ZooKeeper does not answer.
        """
        match await self._inspector.inspect(ledger_id, self._view, suspects=suspects):
            case None:
                return Preview(ledger_id=ledger_id, plan=Plan(), is_gone=True)
            case Blocked() as blocked:
                plan = Plan(blocked=(blocked,))
            case RecoveryRequired() as found:
                plan = await self._plan_open(found, suspects)
            case Inspection() as inspection if is_to_be_ended(inspection, suspects):
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
        """What is closed of it is repaired at once, the rest waits."""
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
    """The copies that will be made of it, and last, and all that will be in the way."""
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
        blocked=tuple(dict.fromkeys(results.in_the_way)),
        untargeted=plan.untargeted,
    )


def _until_recovered(inspection: Inspection) -> Blocked:
    return Blocked(
        reason=Reason.OPEN_FRAGMENT,
        detail="a recovery of it was begun and never ended: that comes before anything is copied"
        + _doubts(inspection.versioned, inspection.view),
    )


def _until_closed(found: RecoveryRequired) -> Blocked:
    why = (
        f"is to be rid of {', '.join(found.leaving)}"
        if found.leaving
        else f"lacks copies of entry {found.first_lacking} on {', '.join(found.lacking)}"
    )
    whose, then = "its writer", "fenced, recovered"
    if found.versioned.metadata.state is LedgerState.IN_RECOVERY:
        whose, then = "whoever began its recovery", "recovered"
    return Blocked(
        reason=Reason.OPEN_LEDGER_GRACE,
        detail=(
            f"its open last fragment {why}: it is left to {whose} for the open-ledger grace, "
            f"then {then}, closed, and only then copied"
        )
        + _doubts(found.versioned, found.view),
    )


def _doubts(versioned: VersionedMetadata, view: ClusterView) -> str:
    doubts = end_doubts(versioned, view)
    return f"; its end may not be provable: {doubts}" if doubts else ""
