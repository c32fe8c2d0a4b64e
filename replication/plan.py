"""Decides what to copy where: a pure function of an inspection and of the possible targets.

``plan_repair`` returns for every bad finding either a ``Repair`` or the reason why there is none
(``Blocked``; rules S1, S4, S11, S12, S15, S16). The worker carries the plan out as it is, and the
dry run shows it. If all copies of a closed ledger are good, the plan may move misplaced ones.
"""

from collections.abc import Collection, Sequence
from contextlib import suppress

from msgspec import Struct, structs

from ledgers.errors import NotEnoughBookiesError
from ledgers.model import BookieId, Fragment, LedgerState
from ledgers.placement import Adherence, Candidate
from replication.copy_reader import CopyFinding, Verdict
from replication.entry_runs import merged
from replication.inspection import Inspection
from replication.reasons import Blocked, Facts, Reason, named
from replication.targets import Targets, exclusion_counts, quarantine_errors


class Repair(Struct, frozen=True, kw_only=True):
    """One copy of a plan: ``target`` receives the entries that bookie index ``index`` of
    ``fragment`` lacks.

    ``entry_ids`` ascend. ``byte_count`` is an estimate of their stored size. If ``target`` is
    already the bookie at that index, the metadata stays. ``rewrites_lac``: the target belongs to
    the last ensemble of a ledger that is not closed (rule S12).
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
    def is_in_place(self) -> bool:
        return self.target == self.replaced


class Plan(Struct, frozen=True, kw_only=True):
    """The copies to make, and what blocks the rest."""

    repairs: tuple[Repair, ...] = ()
    blocked: tuple[Blocked, ...] = ()
    untargeted: tuple[CopyFinding, ...] = ()
    """The findings that are in ``blocked`` for ``NO_TARGET``: no bookie may receive the copy."""

    @property
    def is_whole(self) -> bool:
        """True if nothing is missing and nothing is unknown: the mark may be deleted (rule S6)."""
        return not self.repairs and not self.blocked


def plan_repair(inspection: Inspection, targets: Targets, *, moves_misplaced: bool = False) -> Plan:
    """Return the plan for a ledger. Only closed fragments are repaired (rule S4).

    ``moves_misplaced``: if no copy is missing, move copies that the placement policy wants
    elsewhere. The only randomness is that of the placement policy.
    """
    findings, planning = inspection.findings, _Planning(inspection, targets)
    bad = [finding for finding in findings if finding.verdict is not Verdict.GOOD]
    if not bad:
        # The placement of an open ledger is up to its writer.
        if moves_misplaced and inspection.metadata.is_closed:
            for fragment in dict.fromkeys(finding.fragment for finding in findings):
                planning.add_moves(fragment)
    elif any(f.mismatched for f in findings) and not inspection.has_good_entry:
        # Every copy fails its digest. Our key is more likely wrong than all copies (rule S7).
        planning.blocked.append(Blocked(reason=Reason.DIGEST_SUSPECT))
    else:
        for finding in bad:
            planning.add(finding)
    return Plan(
        repairs=tuple(planning.repairs),
        blocked=tuple(planning.blocked),
        untargeted=tuple(planning.untargeted),
    )


class _Planning:
    """One plan while it is made. Each step knows what the earlier steps will send where."""

    def __init__(self, inspection: Inspection, targets: Targets) -> None:
        self._inspection, self._targets = inspection, targets
        self._metadata = inspection.metadata
        self._loads: dict[BookieId, int] = {}
        """Bytes that the steps so far will send."""
        self._ensembles: dict[int, list[BookieId]] = {}
        """The ensembles after the steps so far, by first entry id."""
        self.repairs: list[Repair] = []
        self.blocked: list[Blocked] = []
        self.untargeted: list[CopyFinding] = []

    def add(self, finding: CopyFinding) -> None:
        """Plan the repair of one bad finding."""
        step = self._step(finding)
        if isinstance(step, Repair):
            self._add_repair(step)
            return
        self.blocked.append(step)
        if step.reason is Reason.NO_TARGET:
            self.untargeted.append(finding)

    def add_moves(self, fragment: Fragment) -> None:
        """Plan moves until the ensemble satisfies the placement policy, or no bookie improves it.
        Every copy is good, so the replaced bookies are sources as well."""
        placement, ensemble = self._targets.placement, list(fragment.ensemble)
        quorums = {"write_quorum": fragment.write_quorum, "ack_quorum": self._metadata.ack_quorum}
        largest = max(len(fragment.entries_of(index)) for index in range(len(ensemble)))
        candidates = self._candidates(self._having_room(largest))
        for _ in fragment.ensemble:  # each move leaves less that is wrong
            if placement.adherence(ensemble, **quorums) is not Adherence.FAIL:
                break
            try:
                moves = placement.choose_moves(
                    candidates, ensemble=ensemble, excluded=fragment.ensemble, **quorums
                )
            except NotEnoughBookiesError as error:
                # The ledger waits for other bookies. Retries alone would not help (gap G18).
                facts = Facts(entry_ids=(fragment.first_entry_id,))
                if local := self._targets.only_local:
                    waits = Blocked(
                        reason=Reason.LEFT_TO_OTHERS, facts=structs.replace(facts, local=local)
                    )
                else:
                    waits = Blocked(
                        reason=Reason.MISPLACED,
                        facts=structs.replace(facts, errors=(str(error),)),
                        until_ms=self._targets.quarantine_end_ms(besides=fragment.ensemble),
                    )
                self.blocked.append(waits)
                break
            for move in moves:
                ensemble[move.index] = move.target
        for index, target in enumerate(ensemble):
            if target != fragment.ensemble[index]:
                self._add_repair(self._repair(fragment, index, target, fragment.entries_of(index)))

    def _step(self, finding: CopyFinding) -> Repair | Blocked:
        bookies = named([finding.bookie])
        if finding.verdict is Verdict.IN_MAINTENANCE:
            # Everything else of the ledger is repaired during the window.
            window = self._inspection.view.orders.maintenance[finding.bookie]
            return Blocked(
                reason=Reason.MAINTENANCE,
                facts=Facts(in_maintenance=bookies, comment=window.reason),
                until_ms=window.until_ms,
            )
        if finding.verdict is Verdict.UNKNOWN:
            # A bookie in quarantine is asked again when its quarantine ends.
            shut = self._targets.quarantined.get(finding.bookie)
            return Blocked(
                reason=Reason.NO_ANSWER,
                facts=Facts(
                    unresponsive=bookies,
                    errors=(shut.reason,) if shut is not None and shut.reason else (),
                ),
                until_ms=None if shut is None else shut.until_ms,
            )
        if not finding.fragment.is_closed:
            # The writer must close the fragment first. If a recovery has fenced the writer, an
            # operator must close it.
            if finding.verdict is not Verdict.DRAINING:
                return Blocked(reason=Reason.OPEN_FRAGMENT, facts=Facts(lacking=bookies))
            is_in_recovery = self._metadata.state is LedgerState.IN_RECOVERY
            return Blocked(
                reason=Reason.RECOVERY_UNENDED if is_in_recovery else Reason.OPEN_FRAGMENT,
                facts=Facts(draining=bookies),
            )
        # A registered member may be given the entries that it lacks (rule S15). A member of the
        # last ensemble of a ledger that is not closed may be only if there is no other bookie.
        if (
            not finding.damaged
            and not self._is_at_open_end(finding.bookie)
            and self._has_room_for(finding)
        ):
            return self._repair(finding.fragment, finding.index, finding.bookie, finding.absent)
        return self._move(finding)

    # --- Copies to the same bookie, or to another -------------------------------------------------

    def _is_at_open_end(self, bookie: BookieId) -> bool:
        """Return True if a reader may take an entry's LAC there for the writer's (rule S12)."""
        return not self._metadata.is_closed and bookie in self._metadata.last_segment.ensemble

    def _has_room_for(self, finding: CopyFinding) -> bool:
        return finding.verdict is Verdict.MISSING and self._having_room(
            len(finding.absent) + len(finding.damaged)
        ).may_refill(finding.bookie)

    def _move(self, finding: CopyFinding) -> Repair | Blocked:
        """Return a copy to another bookie. Damaged entries are overwritten in place only if there
        is no other bookie (rule S15)."""
        fragment, index = finding.fragment, finding.index
        # Its members, and other targets of the fragment, must not come into this ensemble.
        must_not = frozenset({*fragment.ensemble, *self._ensemble(fragment)}).union(
            target
            for (other, other_index), target in self._targets.copied.items()
            if other == fragment and other_index != index
        )
        copied = self._targets.copied.get((fragment, index))
        if copied is not None and copied in self._targets.candidates and copied not in must_not:
            return self._repair(fragment, index, copied, ())
        # Members of the last ensemble of a ledger that is not closed are chosen only if no other
        # bookie is left. Readers believe the LAC of the last copy there, and our copy would have an
        # old one, so the LAC is rewritten (rule S12).
        open_end = () if self._metadata.is_closed else self._metadata.last_segment.ensemble
        excluded = must_not.union(open_end)
        try:
            return self._repair(fragment, index, self._choose(finding, excluded), finding.entries)
        except NotEnoughBookiesError as error:
            if self._has_room_for(finding):
                lacking = merged(finding.absent, finding.damaged)
                return self._repair(fragment, index, finding.bookie, lacking)
            if open_end:
                with suppress(NotEnoughBookiesError):
                    target = self._choose(finding, must_not)
                    return self._repair(fragment, index, target, finding.entries)
            return self._no_target(finding, excluded, error)

    def _choose(self, finding: CopyFinding, excluded: frozenset[BookieId]) -> BookieId:
        return self._targets.placement.choose_replacement(
            self._candidates(self._having_room(len(finding.entries))),
            ensemble=self._ensemble(finding.fragment),
            index=finding.index,
            write_quorum=finding.fragment.write_quorum,
            ack_quorum=self._metadata.ack_quorum,
            excluded=excluded,
        )

    def _having_room(self, entry_count: int) -> Targets:
        """Return the targets that have room for so many more entries (rule S11)."""
        return self._targets.having_room(entry_count * self._inspection.entry_bytes, self._loads)

    def _candidates(self, targets: Targets) -> Collection[Candidate]:
        """Return the candidates, with the bytes that the steps so far will send to them."""
        if not self._loads:
            return targets.candidates.values()
        return [
            structs.replace(each, load_bytes=each.load_bytes + self._loads[bookie])
            if bookie in self._loads
            else each
            for bookie, each in targets.candidates.items()
        ]

    def _ensemble(self, fragment: Fragment) -> list[BookieId]:
        """Return the ensemble as planned, so that two new members suit the policy together."""
        return self._ensembles.setdefault(fragment.first_entry_id, list(fragment.ensemble))

    def _add_repair(self, repair: Repair) -> None:
        self.repairs.append(repair)
        self._loads[repair.target] = self._loads.get(repair.target, 0) + repair.byte_count
        self._ensemble(repair.fragment)[repair.index] = repair.target

    def _repair(
        self, fragment: Fragment, index: int, target: BookieId, entry_ids: Sequence[int]
    ) -> Repair:
        return Repair(
            fragment=fragment,
            index=index,
            target=target,
            entry_ids=entry_ids,
            byte_count=len(entry_ids) * self._inspection.entry_bytes,
            rewrites_lac=self._is_at_open_end(target),
        )

    # --- No target --------------------------------------------------------------------------------

    def _no_target(
        self, finding: CopyFinding, excluded: frozenset[BookieId], error: NotEnoughBookiesError
    ) -> Blocked:
        local = self._targets.only_local
        if local is not None and local in excluded:
            return Blocked(reason=Reason.LEFT_TO_OTHERS, facts=Facts(local=local))
        targets = self._having_room(len(finding.entries))
        counts = exclusion_counts(targets, excluded)
        view, orders = self._inspection.view, self._inspection.view.orders
        # Maintenance keeps a bookie from receiving copies even while it runs (rule S11).
        resting = orders.maintenance.keys() - orders.draining.keys()
        ours = view.writable | resting if local is None else frozenset({local})  # may be targets
        draining = ours & view.writable & orders.draining.keys() - excluded
        in_maintenance = ours & resting - excluded
        absent = in_maintenance - view.available
        if finding.verdict is Verdict.BOOKIE_ABSENT and finding.bookie in view.cookies:
            absent |= {finding.bookie}
        return Blocked(
            reason=Reason.NO_TARGET,
            facts=Facts(
                replaced=finding.bookie,
                excluded=counts,
                errors=(str(error),) if counts is None else quarantine_errors(targets),
                absent=named(absent),
                draining=named(draining),
                in_maintenance=named(in_maintenance),
            ),
            until_ms=self._targets.quarantine_end_ms(besides=excluded),
        )
