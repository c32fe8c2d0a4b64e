"""What is to be copied where: a pure function of a survey and of who may receive.

A plan says for every finding that is not good either a ``Repair`` or a ``Blocked`` reason (rules
S1, S4, S11, S12, S15, S16). The worker executes it as it stands, and ``bookmender plan`` prints it.
A closed ledger of which every copy is good may have some in the wrong places: they are moved where
that is wanted.
"""

from collections.abc import Collection, Sequence

from msgspec import Struct

from ledgers.errors import NotEnoughBookiesError
from ledgers.model import BookieId, Fragment, LedgerState
from ledgers.placement import Adherence, Candidate
from replication.copy_checks import IndexFinding, Verdict
from replication.entry_runs import merged
from replication.inspection import Inspection
from replication.reasons import Blocked, Reason, writer_hint
from replication.targets import CopyKey, Targets, why_nobody, with_load


class Repair(Struct, frozen=True, kw_only=True):
    """Give bookie index ``index`` of ``fragment`` the entries it misses, on ``target``.

    ``entry_ids`` ascend; ``byte_count`` is a guess at their stored size. Where ``target`` is the
    bookie at that index already, the metadata stays. ``rewrites_lac``: the target stands in the
    last ensemble of a ledger that is not closed (rule S12).
    """

    fragment: Fragment
    index: int
    target: BookieId
    entry_ids: Sequence[int]
    byte_count: int = 0
    rewrites_lac: bool = False

    @property
    def replaced(self) -> BookieId:
        return self.fragment.ensemble[self.index]

    @property
    def key(self) -> CopyKey:
        return self.fragment, self.index

    @property
    def is_in_place(self) -> bool:
        return self.target == self.replaced


class Plan(Struct, frozen=True, kw_only=True):
    repairs: tuple[Repair, ...] = ()
    blocked: tuple[Blocked, ...] = ()
    untargeted: tuple[IndexFinding, ...] = ()
    """Those of ``blocked`` that no bookie can take over."""

    @property
    def is_whole(self) -> bool:
        """Nothing is missing and nothing unknown: the mark may go (rule S6)."""
        return not self.repairs and not self.blocked


WHOLE = Plan()
RESTING_SHOWN_MAX = 5
SUSPECT_KEY = "every copy fails its digest: is the ledger's password or digest type another one?"


def plan_repair(inspection: Inspection, targets: Targets, *, moves_misplaced: bool = False) -> Plan:
    """Only closed fragments are repaired (rule S4). Draws nothing but what the placement draws.

    ``moves_misplaced``: copies that the placement policy wants elsewhere are moved, if no copy is
    missing.
    """
    if all(finding.verdict is Verdict.GOOD for finding in inspection.findings):
        return _plan_moves(inspection, targets) if moves_misplaced else WHOLE
    if _is_key_suspect(inspection):
        return Plan(blocked=(Blocked(reason=Reason.DIGEST_SUSPECT, detail=SUSPECT_KEY),))
    planning = _Planning(inspection, targets)
    for finding in inspection.findings:
        planning.see_to(finding)
    return planning.plan


def _plan_moves(inspection: Inspection, targets: Targets) -> Plan:
    """Of a closed ledger: where one is written it is the writer's business."""
    if not inspection.metadata.is_closed:
        return WHOLE
    planning = _Planning(inspection, targets)
    for fragment in dict.fromkeys(finding.fragment for finding in inspection.findings):
        planning.put_in_place(fragment)
    return planning.plan


def _is_key_suspect(inspection: Inspection) -> bool:
    """Copies that all fail their digest alike say more about our key than about them (rule S7)."""
    return any(f.mismatched for f in inspection.findings) and not inspection.has_good_entry


class _Planning:
    """One plan in the making: each step sees what the steps before it will send where."""

    def __init__(self, inspection: Inspection, targets: Targets) -> None:
        self._survey = inspection
        self._metadata = inspection.metadata
        self._targets = targets
        self._loads: dict[BookieId, int] = {}
        """Bytes that the steps so far will send."""
        self._ensembles: dict[int, list[BookieId]] = {}
        """By first entry: as they will be after the steps so far."""
        self._repairs: list[Repair] = []
        self._blocked: list[Blocked] = []
        self._untargeted: list[IndexFinding] = []

    @property
    def plan(self) -> Plan:
        return Plan(
            repairs=tuple(self._repairs),
            blocked=tuple(self._blocked),
            untargeted=tuple(self._untargeted),
        )

    def see_to(self, finding: IndexFinding) -> None:
        if finding.verdict is Verdict.GOOD:
            return
        step = self._step(finding)
        if isinstance(step, Repair):
            self._note(step)
            return
        self._blocked.append(step)
        if step.reason is Reason.NO_TARGET:
            self._untargeted.append(finding)

    def put_in_place(self, fragment: Fragment) -> None:
        """Move copies until the ensemble keeps the placement policy's rule, or nobody makes it any
        better.

        Every copy is good, and the bookie that gives way is read from as well.
        """
        ensemble = list(fragment.ensemble)
        largest = max(len(fragment.entries_of(index)) for index in range(len(ensemble)))
        candidates = self._candidates(self._having_room(largest))
        for _ in fragment.ensemble:  # each move leaves less that is wrong
            if not self._fails_the_rule(ensemble):
                break
            try:
                moves = self._targets.placement.choose_moves(
                    candidates,
                    ensemble=ensemble,
                    write_quorum=fragment.write_quorum,
                    ack_quorum=self._metadata.ack_quorum,
                    excluded=fragment.ensemble,
                )
            except NotEnoughBookiesError as error:
                self._blocked.append(self._misplaced(fragment, error))
                break
            for move in moves:
                ensemble[move.index] = move.target
        for index, target in enumerate(ensemble):
            if target != fragment.ensemble[index]:
                self._note(self._repair(fragment, index, target, fragment.entries_of(index)))

    def _fails_the_rule(self, ensemble: Sequence[BookieId]) -> bool:
        adherence = self._targets.placement.adherence(
            ensemble,
            write_quorum=self._metadata.write_quorum,
            ack_quorum=self._metadata.ack_quorum,
        )
        return adherence is Adherence.FAIL

    def _misplaced(self, fragment: Fragment, error: NotEnoughBookiesError) -> Blocked:
        """It waits for other bookies to come, rather than being tried again and again (gap G18)."""
        where = (
            f"from entry {fragment.first_entry_id} on every copy is there, but in the wrong place"
        )
        if local := self._targets.only_local:
            return Blocked(
                reason=Reason.LEFT_TO_OTHERS,
                detail=f"{where}: this node's bookie {local} is no better one, and replication.target is local",
            )
        return Blocked(
            reason=Reason.MISPLACED,
            detail=f"{where}: {error}; add a bookie where there is none",
            until_ms=self._targets.quarantine_end_ms(besides=fragment.ensemble),
        )

    def _step(self, finding: IndexFinding) -> Repair | Blocked:
        if finding.verdict is Verdict.AWAY:
            return self._wait_for(finding)
        if finding.verdict is Verdict.UNKNOWN:
            return self._unanswered(finding)
        if not finding.fragment.is_closed:
            return self._left_open(finding)
        may_refill = self._may_refill(finding)
        if may_refill and not finding.damaged:
            return self._refill(finding, finding.absent)
        return self._move(finding, may_refill=may_refill)

    def _left_open(self, finding: IndexFinding) -> Blocked:
        """Its writer is to close it; where a recovery has locked him out, only an operator can have
        it ended."""
        hint = writer_hint(self._survey.ledger_id)
        if finding.verdict is not Verdict.DRAINING:
            detail = f"{finding.bookie} lacks entries of a fragment that is not closed yet; {hint}"
            return Blocked(reason=Reason.OPEN_FRAGMENT, detail=detail)
        detail = f"{finding.bookie} drains, and holds a fragment that is not closed yet"
        if self._metadata.state is not LedgerState.IN_RECOVERY:
            return Blocked(
                reason=Reason.OPEN_FRAGMENT,
                detail=f"{detail}; {hint}; bookmender bookie drain {finding.bookie} --fence-open has it closed, too",
            )
        return Blocked(
            reason=Reason.RECOVERY_UNENDED,
            detail=(
                f"{detail}, of a ledger whose recovery was begun and never ended: bookmender bookie drain "
                f"{finding.bookie} --fence-open, or bookmender ledger close {self._survey.ledger_id}, ends it"
            ),
        )

    def _wait_for(self, finding: IndexFinding) -> Blocked:
        """A maintenance window: all else of the ledger is repaired meanwhile."""
        window = self._survey.view.orders.maintenance[finding.bookie]
        why = f" ({window.reason})" if window.reason else ""
        return Blocked(
            reason=Reason.MAINTENANCE,
            detail=f"{finding.bookie} is away for maintenance{why}",
            until_ms=window.until_ms,
        )

    def _unanswered(self, finding: IndexFinding) -> Blocked:
        """Tried again when the bookie is, where that is known."""
        shut = self._targets.quarantined.get(finding.bookie)
        why = f": {shut.reason}" if shut is not None and shut.reason else ""
        return Blocked(
            reason=Reason.NO_ANSWER,
            detail=f"{finding.bookie} does not answer{why}",
            until_ms=None if shut is None else shut.until_ms,
        )

    def _may_refill(self, finding: IndexFinding) -> bool:
        """Whether a member that is there may be given what it lacks (rule S15).

        A member of the last ensemble of a ledger that is not closed may only where nobody else is
        left (rule S12).
        """
        return not self._is_at_open_end(finding.bookie) and self._has_room_for(finding)

    def _is_at_open_end(self, bookie: BookieId) -> bool:
        """Whether a reader may take the LAC of an entry on this bookie for the writer's."""
        return not self._metadata.is_closed and bookie in self._metadata.last_segment.ensemble

    def _has_room_for(self, finding: IndexFinding) -> bool:
        return finding.verdict is Verdict.MISSING and self._having_room(
            len(finding.absent) + len(finding.damaged)
        ).may_refill(finding.bookie)

    def _move(self, finding: IndexFinding, *, may_refill: bool) -> Repair | Blocked:
        """To another bookie; damage stays where it is, to be overwritten, only if there is none
        (S15)."""
        taken = self._taken(finding)
        copied = self._targets.copied.get((finding.fragment, finding.index))
        must_not = self._members_and_targets(finding)
        if copied is not None and copied in self._targets.candidates and copied not in must_not:
            return self._repair(finding.fragment, finding.index, copied, ())
        try:
            target = self._choose(finding, taken)
        except NotEnoughBookiesError as error:
            if may_refill or self._has_room_for(finding):
                return self._refill(finding, merged(finding.absent, finding.damaged))
            at_open_end = self._choose_at_open_end(finding)
            if at_open_end is None:
                return self._nobody_for(finding, taken, error)
            target = at_open_end
        return self._repair(finding.fragment, finding.index, target, finding.entries)

    def _choose_at_open_end(self, finding: IndexFinding) -> BookieId | None:
        """A member of the last ensemble of a ledger that is not closed, where no other bookie is
        left."""
        if self._metadata.is_closed:
            return None
        try:
            return self._choose(finding, self._members_and_targets(finding))
        except NotEnoughBookiesError:
            return None

    def _choose(self, finding: IndexFinding, taken: frozenset[BookieId]) -> BookieId:
        return self._targets.placement.choose_replacement(
            self._candidates(self._having_room(len(finding.entries))),
            ensemble=self._ensemble(finding.fragment),
            index=finding.index,
            write_quorum=finding.fragment.write_quorum,
            ack_quorum=self._metadata.ack_quorum,
            excluded=taken,
        )

    def _having_room(self, entry_count: int) -> Targets:
        """Those that have room for so many entries more (rule S11)."""
        return self._targets.having_room(entry_count * self._survey.entry_bytes, self._loads)

    def _candidates(self, targets: Targets) -> Collection[Candidate]:
        return with_load(targets.candidates, self._loads)

    def _ensemble(self, fragment: Fragment) -> list[BookieId]:
        """As it will be, so that two who come into it keep the placement rule together."""
        return self._ensembles.setdefault(fragment.first_entry_id, list(fragment.ensemble))

    def _note(self, repair: Repair) -> None:
        self._repairs.append(repair)
        self._loads[repair.target] = self._loads.get(repair.target, 0) + repair.byte_count
        self._ensemble(repair.fragment)[repair.index] = repair.target

    def _taken(self, finding: IndexFinding) -> frozenset[BookieId]:
        """Bookies that are not chosen for this copy while there are others.

        Besides those that must not be, the members of the last ensemble of a ledger that is not
        closed: a copy's LAC field is the reader's clue there, and ours would be an old one (rule
        S12). Where no other bookie is left they are chosen all the same, and the LAC is rewritten.
        """
        taken = self._members_and_targets(finding)
        return (
            taken if self._metadata.is_closed else taken.union(self._metadata.last_segment.ensemble)
        )

    def _members_and_targets(self, finding: IndexFinding) -> frozenset[BookieId]:
        """Bookies that must not come into this ensemble: its members, and other targets of the
        fragment."""
        taken = {*finding.fragment.ensemble, *self._ensemble(finding.fragment)}
        taken.update(
            target
            for (fragment, index), target in self._targets.copied.items()
            if fragment == finding.fragment and index != finding.index
        )
        return frozenset(taken)

    def _refill(self, finding: IndexFinding, entry_ids: Sequence[int]) -> Repair:
        return self._repair(finding.fragment, finding.index, finding.bookie, entry_ids)

    def _repair(
        self, fragment: Fragment, index: int, target: BookieId, entry_ids: Sequence[int]
    ) -> Repair:
        return Repair(
            fragment=fragment,
            index=index,
            target=target,
            entry_ids=entry_ids,
            byte_count=len(entry_ids) * self._survey.entry_bytes,
            rewrites_lac=self._is_at_open_end(target),
        )

    def _nobody_for(
        self, finding: IndexFinding, taken: frozenset[BookieId], error: NotEnoughBookiesError
    ) -> Blocked:
        local = self._targets.only_local
        if local is not None and local in taken:
            return Blocked(
                reason=Reason.LEFT_TO_OTHERS,
                detail=f"this node's bookie {local} holds a part of it already, and replication.target is local",
            )
        targets = self._having_room(len(finding.entries))
        rules = why_nobody(targets, taken) or f"the placement policy allows none: {error}"
        return Blocked(
            reason=Reason.NO_TARGET,
            detail=f"no bookie can take over from {finding.bookie}: {rules}; {self._advice(finding, taken)}",
            until_ms=self._targets.quarantine_end_ms(besides=taken),
        )

    def _advice(self, finding: IndexFinding, taken: Collection[BookieId]) -> str:
        """A bookie that is away keeps its cookie, unless it is never to come back."""
        may_return = finding.verdict is Verdict.LOST and finding.bookie in self._survey.view.cookies
        advice = "start it again, or add a bookie" if may_return else "add a bookie"
        if drained := self._draining(taken):
            which = drained[0] if len(drained) == 1 else "ID"
            advice += f", or keep {' or '.join(drained)}: bookmender bookie drain {which} --cancel"
        resting = self._resting(taken)
        if not resting:
            return advice
        whose, who, which = "their", "they run", "ID"
        if len(resting) == 1:
            whose, who, which = "its", "it runs", resting[0]
        runs = "" if self._survey.view.available.issuperset(resting) else f" and {who}"
        more = ", …" if len(resting) > RESTING_SHOWN_MAX else ""
        named = ", ".join(resting[:RESTING_SHOWN_MAX]) + more
        end = f"bookmender bookie maintenance {which} --end"
        return f"{named} may once {whose} maintenance is over ({end}){runs}; else {advice}"

    def _draining(self, taken: Collection[BookieId]) -> list[BookieId]:
        """Who takes writes, and might take over but for the order to drain it."""
        view, local = self._survey.view, self._targets.only_local
        draining = view.writable & view.orders.draining.keys() - set(taken)
        return sorted(draining if local is None else draining & {local})

    def _resting(self, taken: Collection[BookieId]) -> list[BookieId]:
        """Who might take over but for its maintenance, which keeps it from that while it runs, too
        (rule S11)."""
        orders, local = self._survey.view.orders, self._targets.only_local
        resting = orders.maintenance.keys() - orders.draining.keys() - set(taken)
        return sorted(resting if local is None else resting & {local})
