"""The text for each reason that blocks a repair: what, what happens next, and what to do."""

import re

import pytest

from daemon.messages import EXCLUSIONS, TEXTS, copy_doubt_text, message
from replication.by_hand import CopyDoubt
from replication.copy_reader import Verdict
from replication.reasons import Blocked, Exclusion, Facts, Reason
from tests.replication.ledger_values import B1, B2, B3, B4
from tests.said import Said

SCENES = [
    (Reason.OPEN_LEDGER_GRACE, Facts(absent=(B1,))),
    (
        Reason.OPEN_LEDGER_GRACE,
        Facts(lacking=(B1,), entry_ids=(3,), is_in_recovery=True, is_end_doubtful=True),
    ),
    (Reason.WRITER_ALIVE, Facts(absent=(B1,), grace_count=3, grace_count_max=10)),
    (Reason.OPEN_FRAGMENT, Facts(draining=(B1,))),
    (Reason.OPEN_FRAGMENT, Facts(is_in_recovery=True)),
    (Reason.RECOVERY_UNENDED, Facts(draining=(B1, B2))),
    (Reason.NO_COPY, Facts(entry_ids=(4,), entry_count=1, absent=(B1,), decommissioned=(B2,))),
    (
        Reason.NO_COPY,
        Facts(entry_ids=(1, 4, 7, 10, 13), entry_count=100_000, has_more_entries=True),
    ),
    (Reason.NO_COPY, Facts(withheld_count=20_000)),
    (
        Reason.NO_TARGET,
        Facts(
            replaced=B1,
            absent=(B1,),
            draining=(B2,),
            in_maintenance=(B3,),
            excluded=((Exclusion.MEMBER, 2), (Exclusion.DRAINING, 1)),
        ),
    ),
    (Reason.NO_TARGET, Facts(ack_quorum=3, absent=(B1,), excluded=())),
    (Reason.NO_TARGET, Facts(replaced=B1, errors=("all on one rack",))),
    (Reason.MISPLACED, Facts(entry_ids=(5,), errors=("all on one rack",))),
    (Reason.NO_ANSWER, Facts(unresponsive=(B1,), errors=("it requires authentication",))),
    (Reason.RECOVERY_FAILED, Facts(errors=("a bookie failed",), reformatted=(B1,))),
    (Reason.END_DAMAGED, Facts(errors=("no good copy of entry 5",))),
    (Reason.NO_COVERAGE, Facts(errors=("too few answer",), absent=(B1, B2))),
    (Reason.END_UNPROVEN, Facts(errors=("unproven",), needed=(B1, B2), reformatted=(B3,))),
    (Reason.END_UNPROVEN, Facts(errors=("unproven",), are_all_reformatted=True)),
    (Reason.END_UNPROVEN, Facts(errors=("unproven",), ack_quorum=0)),
    (Reason.CORRUPT_METADATA, Facts(errors=("unknown version",))),
    (Reason.ACCESS_DENIED, Facts(errors=("access denied",))),
    (Reason.WRITE_REFUSED, Facts(metadata_bytes=2_000_000, request_bytes_max=1_000_000)),
    (Reason.DIGEST_SUSPECT, Facts()),
    (Reason.CONFLICTS, Facts(round_count=10)),
    (Reason.MAINTENANCE, Facts(in_maintenance=(B1,), comment="new disk")),
    (Reason.HOLD, Facts(comment="3 of 5 went")),
    (Reason.LEFT_TO_OTHERS, Facts(local=B1)),
    (Reason.JOURNAL, Facts(errors=("no space",))),
]


def test_each_reason_says_what_comes_next_and_what_to_do(said: Said) -> None:
    scenes = {}
    for reason, facts in SCENES:
        told = message(7, Blocked(reason=reason, facts=facts))
        named = ", ".join(f"{name}={value!r}" for name, value in facts_of(facts).items())
        lines = (f"{told.what}.", f"next: {told.outlook}", f"to do: {told.advice}")
        scenes[f"{reason.value}: {named}"] = "\n".join(x for x in lines if not x.endswith(": "))

    said("messages", scenes)


def facts_of(facts: Facts) -> dict[str, object]:
    """Return the facts that are set."""
    unset = Facts()
    return {
        name: value
        for name in facts.__struct_fields__
        if (value := getattr(facts, name)) != getattr(unset, name)
    }


def test_every_reason_and_every_reason_to_exclude_a_target_has_a_text() -> None:
    assert TEXTS.keys() == {reason for reason, _ in SCENES} == set(Reason)
    assert EXCLUSIONS.keys() == set(Exclusion)


@pytest.mark.parametrize("reason", Reason)
def test_facts_of_another_release_may_be_missing(reason: Reason) -> None:
    first = Blocked(reason=Reason.NO_COPY, besides=(Blocked(reason=reason),))
    for told in (message(7, Blocked(reason=reason)), message(7, first)):
        assert told.what
        assert "None" not in told.text
        assert not re.search(r"[:;,] ?(\.|$)|\(\)|  |[{}]", told.text)


def test_a_ledger_that_no_recovery_can_end_is_not_closed_with_loss() -> None:
    told = message(7, Blocked(reason=Reason.END_UNPROVEN, facts=Facts(ack_quorum=0)))

    assert "ledger close" not in told.advice


def test_several_reasons_are_told_once_each() -> None:
    lacking = (Facts(entry_ids=(4,), absent=(B1,)), Facts(entry_ids=(7,), absent=(B1,)))
    target = Blocked(reason=Reason.NO_TARGET, facts=Facts(replaced=B4, excluded=()))
    first, other = (Blocked(reason=Reason.NO_COPY, facts=facts) for facts in lacking)

    told = message(7, Blocked(reason=first.reason, facts=first.facts, besides=(other, target)))

    assert told.what.count("; also, ") == 2
    assert "entry 4" in told.what
    assert "entry 7" in told.what
    assert told.advice == f"Start {B1}. Add a bookie."


@pytest.mark.parametrize(
    ("verdict", "text"),
    [
        (Verdict.BOOKIE_ABSENT, f"{B1} is not registered: 10 entries from 0 to 9"),
        (Verdict.IN_MAINTENANCE, f"{B1} is in maintenance, and may not have its 10 entries"),
        (Verdict.MISSING, f"{B1} lacks 2 of its 10 entries from 0 to 9"),
        (Verdict.UNKNOWN, f"{B1} did not answer for its 10 entries from 0 to 9"),
    ],
)
def test_each_doubt_about_restored_metadata_is_one_sentence(verdict: Verdict, text: str) -> None:
    doubt = CopyDoubt(
        bookie=B1, verdict=verdict, entry_count=10, bad_count=2, first_entry_id=0, last_entry_id=9
    )

    assert copy_doubt_text(7, doubt).startswith(text)
