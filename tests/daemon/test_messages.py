"""The text for each reason that blocks a repair: what, what happens next, and what to do."""

import re

import pytest
from msgspec.structs import replace

from daemon.messages import CANNOT_CLOSE, copy_doubt_text, message
from replication.by_hand import CopyDoubt
from replication.copy_reader import Verdict
from replication.reasons import Blocked, Exclusion, Facts, Reason
from tests.replication.ledger_values import B1, B2, B3, B4

CLOSE = "bookmender ledger close 7"

ROWS = [
    (
        Reason.OPEN_LEDGER_GRACE,
        Facts(absent=(B1,)),
        "its open last fragment is left to its writer for the open-ledger grace (not registered: "
        f"{B1})",
        "",
        "Then a worker fences, recovers and closes it, and repairs its copies.",
    ),
    (
        Reason.OPEN_LEDGER_GRACE,
        Facts(lacking=(B1,), entry_ids=(3,), is_in_recovery=True, is_end_doubtful=True),
        "its recovery is not finished, and waits for the open-ledger grace (entry 3 has too few "
        f"copies; lacking entries: {B1})",
        "",
        "Then a worker recovers and closes it, and repairs its copies. Its end may not be "
        "provable.",
    ),
    (
        Reason.WRITER_ALIVE,
        Facts(absent=(B1,), grace_count=3, grace_count_max=10),
        f"its writer is still writing (not registered: {B1}); grace 3 of 10",
        "",
        "When the writer stops, or after the last grace, the ledger is fenced, recovered and "
        "closed.",
    ),
    (
        Reason.OPEN_FRAGMENT,
        Facts(draining=(B1,)),
        f"an open fragment cannot be copied (draining: {B1})",
        f"Its writer must close it. If the writer has stopped, run `{CLOSE} --yes`; add `--force` "
        f"if that is not certain. `bookmender bookie drain {B1} --fence-open` closes it, too.",
    ),
    (
        Reason.RECOVERY_UNENDED,
        Facts(draining=(B1,)),
        f"an open fragment cannot be copied, and its recovery was not finished (draining: {B1})",
        f"Run `bookmender bookie drain {B1} --fence-open` or `{CLOSE} --yes`.",
    ),
    (
        Reason.NO_COPY,
        Facts(entry_ids=(4,), entry_count=1, absent=(B1,), decommissioned=(B2,)),
        f"no bookie that answers has a good copy of entry 4, but {B1} (absent) or {B2} "
        "(decommissioned) may have one",
        f"Start {B1}.",
    ),
    (
        Reason.NO_COPY,
        Facts(entry_ids=(1, 4, 7, 10, 13), entry_count=100_000, has_more_entries=True),
        "no bookie that answers has a good copy of more than 100,000 entries (1, 4, 7, 10, 13, "
        "…), and no absent bookie should have one",
        "",
    ),
    (
        Reason.NO_COPY,
        Facts(withheld_count=20_000),
        "20,000 copies wait, because other entries of the same fragments have no good copy",
        "",
    ),
    (
        Reason.NO_TARGET,
        Facts(
            replaced=B1,
            absent=(B1,),
            draining=(B2,),
            in_maintenance=(B3,),
            excluded=((Exclusion.MEMBER, 2), (Exclusion.DRAINING, 1)),
        ),
        f"no bookie may receive the copy of {B1}: 3 writable bookies are excluded: 2 "
        "already in the ensemble, 1 draining",
        f"End the maintenance of {B3} (`bookmender bookie maintenance {B3} --end`), or start {B1}, "
        f"or add a bookie, or keep {B2} (`bookmender bookie drain {B2} --cancel`).",
    ),
    (
        Reason.NO_TARGET,
        Facts(ack_quorum=3, absent=(B1,), excluded=()),
        "recovery must store the last entries on 3 bookies (the ack quorum), and no bookie may "
        "join: no bookie is writable",
        f"Start {B1}, or add a bookie.",
    ),
    (
        Reason.MISPLACED,
        Facts(entry_ids=(5,), errors=("all on one rack",)),
        "from entry 5 on every copy exists, but no bookie improves the placement: all on one rack",
        "Add a bookie where the placement policy needs one.",
    ),
    (
        Reason.NO_ANSWER,
        Facts(unresponsive=(B1,), errors=("it requires authentication",)),
        f"no answer from {B1}: it requires authentication",
        "",
    ),
    (
        Reason.RECOVERY_FAILED,
        Facts(errors=("a bookie failed",), reformatted=(B1,)),
        f"a bookie failed (reformatted after the ledger was created: {B1})",
        "",
    ),
    (
        Reason.END_DAMAGED,
        Facts(errors=("no good copy of entry 5",)),
        "no good copy of entry 5",
        f"If no bookie will ever return a good copy, `{CLOSE} --accept-loss --force` shows which "
        "entries would be given up. With `--yes` it closes the ledger before these entries.",
    ),
    (
        Reason.NO_COVERAGE,
        Facts(errors=("too few answer",), absent=(B1, B2)),
        f"too few bookies answer to find its end (not registered: {B1}, {B2})",
        f"Start enough of: {B1}, {B2}.",
    ),
    (Reason.NO_COVERAGE, Facts(errors=("too few answer",)), "too few answer", ""),
    (
        Reason.END_UNPROVEN,
        Facts(errors=("unproven",), needed=(B1, B2), reformatted=(B3,)),
        f"unproven (reformatted after the ledger was created: {B3})",
        f"Start enough of {B1}, {B2}, even without their data: the ledger cannot be closed "
        f"before. If its end still cannot be proven then, run `{CLOSE} --accept-loss --yes`.",
    ),
    (
        Reason.END_UNPROVEN,
        Facts(errors=("unproven",), are_all_reformatted=True),
        "unproven",
        f"`{CLOSE} --accept-loss --yes` closes the ledger after the last entry that is left. The "
        "cookies of all bookies are newer than the ledger. If ZooKeeper was imported, or bookie "
        "ids changed, and no disk was erased, run `bookmender bookie trust-identities`.",
    ),
    (Reason.END_UNPROVEN, Facts(errors=("unproven",), ack_quorum=0), "unproven", CANNOT_CLOSE),
    (
        Reason.CORRUPT_METADATA,
        Facts(errors=("unknown version",)),
        "unknown version",
        "`bookmender ledger restore 7` lists earlier metadata, if it was written on this host.",
    ),
    (
        Reason.ACCESS_DENIED,
        Facts(errors=("access denied",)),
        "its metadata cannot be read: access denied",
        "If an ACL denies access, a ZooKeeper user with permission can change it with `setAcl`.",
    ),
    (
        Reason.WRITE_REFUSED,
        Facts(metadata_bytes=2_000_000, request_bytes_max=1_000_000),
        "its metadata of 2,000,000 bytes is too large to be written again: "
        "zookeeper.request_bytes_max is 1,000,000",
        "Raise it on all nodes if jute.maxbuffer of the servers allows more.",
    ),
    (
        Reason.DIGEST_SUSPECT,
        Facts(),
        "every copy fails its digest",
        "Check the password and the digest type of the ledger.",
    ),
    (
        Reason.CONFLICTS,
        Facts(round_count=10),
        "its metadata or its bookies changed in each of 10 rounds",
        "",
    ),
    (
        Reason.MAINTENANCE,
        Facts(in_maintenance=(B1,), comment="new disk"),
        f"bookies in maintenance: {B1}: new disk",
        "",
        "The repair continues when these bookies are back, or when the maintenance window ends.",
    ),
    (
        Reason.HOLD,
        Facts(comment="3 of 5 went"),
        "it is not closed, and a safety hold forbids fencing (3 of 5 went)",
        "See `bookmender hold`.",
    ),
    (
        Reason.LEFT_TO_OTHERS,
        Facts(local=B1),
        f"this node may copy to its bookie {B1} only (replication.target is local), and that "
        "bookie cannot receive the copy",
        "",
    ),
    (Reason.JOURNAL, Facts(errors=("no space",)), "no space", ""),
]


@pytest.mark.parametrize("row", ROWS)
def test_a_blocked_repair_has_a_text_and_what_comes_next(
    row: tuple[Reason, Facts, *tuple[str, ...]],
) -> None:
    reason, facts, *texts = row
    what, advice, outlook = [*texts, ""][:3]

    told = message(7, Blocked(reason=reason, facts=facts))

    assert (told.what, told.advice, told.outlook) == (what, advice, outlook)
    assert told.text == ". ".join(filter(None, [what, outlook[:-1], advice[:-1]]))


def test_the_table_has_every_reason() -> None:
    assert {row[0] for row in ROWS} == set(Reason)


@pytest.mark.parametrize("reason", Reason)
def test_facts_of_another_release_may_be_missing(reason: Reason) -> None:
    told = message(7, Blocked(reason=reason))

    assert told.what
    assert "None" not in told.text
    assert not re.search(r"[:;,] ?(\.|$)|\(\)|  ", told.text)


@pytest.mark.parametrize("reason", Reason)
def test_further_reasons_without_facts_leave_no_gap(reason: Reason) -> None:
    first = Blocked(reason=Reason.NO_COPY, facts=Facts(entry_ids=(4,), entry_count=1, absent=(B1,)))

    told = message(7, replace(first, besides=(Blocked(reason=reason),)))

    assert not re.search(r"[:;,] ?(\.|$)|\(\)|  ", told.text)


def test_a_further_reason_without_facts_is_told() -> None:
    first = Blocked(reason=Reason.NO_COPY, facts=Facts(entry_ids=(4,), entry_count=1, absent=(B1,)))

    told = message(7, replace(first, besides=(Blocked(reason=Reason.NO_ANSWER),)))

    assert told.text == (
        f"no bookie that answers has a good copy of entry 4, but {B1} (absent) may have one; "
        f"also, a bookie did not answer. Start {B1}"
    )


@pytest.mark.parametrize("exclusion", Exclusion)
def test_every_reason_to_exclude_a_target_has_a_text(exclusion: Exclusion) -> None:
    facts = Facts(replaced=B1, excluded=((exclusion, 1),))

    assert (
        "1 writable bookie is excluded: 1 "
        in message(7, Blocked(reason=Reason.NO_TARGET, facts=facts)).what
    )


def test_several_parts_without_copies_are_numbered_and_share_one_advice() -> None:
    parts = [
        Facts(entry_ids=(4,), entry_count=1, absent=(B1,)),
        Facts(entry_ids=(7, 9), entry_count=2, absent=(B2,), decommissioned=(B3,)),
        Facts(withheld_count=20),
        Facts(withheld_count=3),
    ]
    first, *others = (Blocked(reason=Reason.NO_COPY, facts=facts) for facts in parts)
    target = Blocked(reason=Reason.NO_TARGET, facts=Facts(replaced=B4, excluded=()))

    told = message(7, replace(first, besides=(*others, target)))

    assert told.text == (
        f"no bookie that answers has a good copy of (1) entry 4, but {B1} (absent) may have one; "
        f"(2) entries 7, 9, but {B2} (absent) or {B3} (decommissioned) may have one; 23 copies of "
        "other entries wait for these entries; also, no bookie may receive "
        f"the copy of {B4}: no bookie is writable. Start {B1}, {B2}. Add a bookie"
    )


def test_equal_advice_for_several_reasons_is_given_once() -> None:
    lacking = (Facts(absent=(b,), replaced=b, excluded=()) for b in (B1, B1))
    first, other = (Blocked(reason=Reason.NO_TARGET, facts=facts) for facts in lacking)

    told = message(7, replace(first, besides=(other,)))

    assert told.text == (
        f"no bookie may receive the copy of {B1}: no bookie is writable. Start {B1}, or add a "
        "bookie"
    )


@pytest.mark.parametrize(
    ("verdict", "text"),
    [
        (
            Verdict.BOOKIE_ABSENT,
            f"{B1} is not registered: 10 entries from 0 to 9 would lack a copy",
        ),
        (
            Verdict.IN_MAINTENANCE,
            f"{B1} is in maintenance, and may not have its 10 entries from 0 to 9",
        ),
        (Verdict.MISSING, f"{B1} lacks 2 of its 10 entries from 0 to 9"),
        (Verdict.UNKNOWN, f"{B1} did not answer for its 10 entries from 0 to 9"),
    ],
)
def test_each_doubt_about_restored_metadata_is_one_sentence(verdict: Verdict, text: str) -> None:
    doubt = CopyDoubt(
        bookie=B1,
        verdict=verdict,
        entry_count=10,
        bad_count=2,
        first_entry_id=0,
        last_entry_id=9,
    )

    assert copy_doubt_text(7, doubt) == text
