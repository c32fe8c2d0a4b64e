"""The text for each reason that blocks a repair: what, and what to do."""

import pytest

from daemon.messages import copy_doubt_text, message
from replication.commit import CopyDoubt
from replication.copy_checks import Verdict
from replication.reasons import Blocked, Exclusion, Facts, Reason
from tests.replication.ledger_values import B1, B2, B3

CLOSE = "bookmender ledger close 7"

ROWS = [
    (
        Reason.OPEN_LEDGER_GRACE,
        Facts(absent=(B1,)),
        f"its open last fragment is left to its writer for the open-ledger grace (not registered: {B1})",
        "Then it is fenced, recovered and closed, and its copies are repaired.",
    ),
    (
        Reason.OPEN_LEDGER_GRACE,
        Facts(lacking=(B1,), entry_ids=(3,), is_in_recovery=True, is_end_doubtful=True),
        "its open last fragment is left to its recovery by another client for the open-ledger grace "
        f"(entry 3 has too few copies; lacking entries: {B1})",
        "Then it is recovered and closed, and its copies are repaired. Its end may not be provable.",
    ),
    (
        Reason.WRITER_ALIVE,
        Facts(absent=(B1,), grace_count=3, grace_count_max=10),
        f"its writer is still writing (not registered: {B1}); grace 3 of 10",
        "When the writer stops, the ledger is recovered and closed.",
    ),
    (
        Reason.OPEN_FRAGMENT,
        Facts(draining=(B1,)),
        f"an open fragment cannot be copied (draining: {B1})",
        f"Its writer must close it. If the writer is gone, run `{CLOSE} --yes`, with `--force` if nobody knows whether "
        f"it is gone. `bookmender bookie drain {B1} --fence-open` closes it, too.",
    ),
    (
        Reason.RECOVERY_UNENDED,
        Facts(draining=(B1,)),
        f"an open fragment cannot be copied, and its recovery was never finished (draining: {B1})",
        f"Run `bookmender bookie drain {B1} --fence-open` or `{CLOSE}`.",
    ),
    (
        Reason.NO_COPY,
        Facts(entry_ids=(4,), entry_count=1, absent=(B1,), decommissioned=(B2,)),
        f"no good copy is available of entry 4; may have one: not registered: {B1}; decommissioned: {B2}",
        f"Start {B1}.",
    ),
    (
        Reason.NO_COPY,
        Facts(entry_ids=(1, 4, 7, 10, 13), entry_count=100_000, has_more_entries=True),
        "no good copy is available of more than 100,000 entries (1, 4, 7, 10, 13, …); no absent bookie should have one",
        "",
    ),
    (
        Reason.NO_COPY,
        Facts(withheld_count=20_000),
        "copies of other entries that are not made for the same reason: 20,000",
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
        f"no bookie may receive the copy of {B1}: of 3 writable 2 already in the ensemble, 1 draining",
        f"End the maintenance of {B3} (`bookmender bookie maintenance {B3} --end`), or start {B1}, or add a bookie, or "
        f"keep {B2} (`bookmender bookie drain {B2} --cancel`).",
    ),
    (
        Reason.NO_TARGET,
        Facts(ack_quorum=3, absent=(B1,), excluded=()),
        "recovery must store the last entries on 3 bookies (the ack quorum), and no bookie may join: no bookie is "
        "writable",
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
        Facts(errors=("no good copy of entry 5",), is_end_damaged=True),
        "no good copy of entry 5",
        f"If no bookie will ever return a good copy, `{CLOSE} --accept-loss --force` shows which entries would be given "
        "up; with `--yes` it closes the ledger before them.",
    ),
    (
        Reason.NO_COVERAGE,
        Facts(errors=("too few answer",), absent=(B1, B2)),
        f"too few answer (not registered: {B1}, {B2})",
        f"Start enough of: {B1}, {B2}.",
    ),
    (
        Reason.END_UNPROVEN,
        Facts(errors=("unproven",), needed=(B1, B2), reformatted=(B3,)),
        f"unproven (reformatted after the ledger was created: {B3})",
        f"Start enough of {B1}, {B2} (empty, if their data is gone): nothing closes the ledger before. If its end is "
        f"still not provable, run `{CLOSE} --accept-loss --yes`.",
    ),
    (
        Reason.END_UNPROVEN,
        Facts(errors=("unproven",), are_all_reformatted=True),
        "unproven",
        f"`{CLOSE} --accept-loss --yes` closes the ledger after the last entry that is left. Every bookie was set up "
        "after the ledger. If ZooKeeper was imported, or bookie ids changed, and no disk was wiped, run `bookmender "
        "bookie trust-identities`.",
    ),
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
        "its metadata of 2,000,000 bytes is too large to be written again: zookeeper.request_bytes_max is 1,000,000",
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
        "The repair continues when they are back, or when the maintenance window ends.",
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
        f"this node may copy to its bookie {B1} only (replication.target is local), and that bookie cannot receive the "
        "copy",
        "",
    ),
    (Reason.JOURNAL, Facts(errors=("no space",)), "no space", ""),
]


@pytest.mark.parametrize(("reason", "facts", "what", "advice"), ROWS)
def test_a_blocked_repair_is_told_with_what_to_do(
    reason: Reason, facts: Facts, what: str, advice: str
) -> None:
    told = message(7, Blocked(reason=reason, facts=facts))

    assert (told.what, told.advice) == (what, advice)


def test_the_table_has_every_reason() -> None:
    assert {reason for reason, *_ in ROWS} == set(Reason)


@pytest.mark.parametrize("reason", Reason)
def test_facts_of_another_release_may_be_missing(reason: Reason) -> None:
    assert "None" not in message(7, Blocked(reason=reason)).text


def test_what_blocks_other_parts_follows_and_equal_advice_is_given_once() -> None:
    lost = Facts(entry_ids=(4,), entry_count=1, absent=(B1,))
    other = Facts(entry_ids=(5,), entry_count=1, absent=(B1,))
    besides = Blocked(reason=Reason.NO_COPY, facts=other)

    told = message(7, Blocked(reason=Reason.NO_COPY, facts=lost, besides=(besides,)))

    assert told.what.count("no good copy") == 2
    assert told.text.endswith(f". Start {B1}")


@pytest.mark.parametrize(
    ("verdict", "text"),
    [
        (Verdict.LOST, f"{B1} is not registered: 10 entries from 0 to 9 would lack a copy"),
        (Verdict.AWAY, f"{B1} is in maintenance, and may not have its 10 entries from 0 to 9"),
        (Verdict.MISSING, f"{B1} lacks 2 of its 10 entries from 0 to 9"),
        (Verdict.UNKNOWN, f"{B1} did not answer for its 10 entries from 0 to 9"),
    ],
)
def test_what_speaks_against_restored_metadata_is_a_sentence_a_bookie(
    verdict: Verdict, text: str
) -> None:
    doubt = CopyDoubt(
        bookie=B1,
        verdict=verdict,
        entry_count=10,
        bad_count=2,
        first_entry_id=0,
        last_entry_id=9,
    )

    assert copy_doubt_text(7, doubt) == text
