"""Explains each condition of ``bookmender status``: its meaning, usual causes, what to do, and how
it clears."""

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass

from daemon.status.conditions import Code

WIDTH = 96


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """``severity``: the severities that the condition can have, and when. ``summary``: its meaning
    in a few words."""

    severity: str
    summary: str
    meaning: str
    causes: str
    action: str
    clears: str


def explain(code: Code) -> str:
    """Return the explanation of one condition as wrapped text."""
    it = EXPLANATIONS[code]
    parts = (
        f"Meaning: {it.meaning}",
        f"Causes: {it.causes}",
        f"Do: {it.action}",
        f"Clears: {it.clears}",
    )
    wrapped = (textwrap.fill(part, WIDTH, subsequent_indent="  ") for part in parts)
    return "\n".join([f"{code}: {it.severity}", *wrapped])


EXPLANATIONS: Mapping[Code, Explanation] = {
    Code.NO_BOOKIES: Explanation(
        severity="UNKNOWN",
        summary="no bookie is registered, so nothing can be concluded",
        meaning="ZooKeeper lists no bookie at all. An empty list does not prove that all bookies "
        "failed, so no bookie counts as lost, and all other conditions are shown as INFO.",
        causes="ZooKeeper or the network failed, and all bookie sessions expired. The configured "
        "address names another cluster. All bookies are stopped.",
        action="Check ZooKeeper and the network, then the bookies. Check metadata_service_uri.",
        clears="when a bookie registers.",
    ),
    Code.LEDGERS_UNAVAILABLE: Explanation(
        severity="ERROR",
        summary="ledgers have entries without a copy on a registered bookie",
        meaning="Every copy of some entries is on bookies that are not registered. These entries "
        "can neither be read nor repaired. Entries that may exist in an open ledger count as "
        "existing.",
        causes="More bookies of one ensemble failed, or are in maintenance, than the write quorum "
        "tolerates.",
        action="Start the named bookies. Where one bookie is enough for some ledgers, status "
        "shows for how many.",
        clears="some seconds after enough bookies are registered again, when the leader has "
        "counted.",
    ),
    Code.SAFETY_HOLD: Explanation(
        severity="ERROR if the leader began it, WARN if an operator did",
        summary="marking and fencing are paused after a mass failure",
        meaning="No further ledger is marked for lost bookies, and no open ledger is fenced. "
        "Ledgers marked before are still repaired. A Java leader ignores holds.",
        causes="Many bookies disappeared within a short time ([hold] in the settings), often "
        "because of the network, a rack or a faulty rollout. Or an operator ran bookmender hold "
        "begin.",
        action="Find out why so many bookies are absent, and start them. If they are lost for "
        "good, end the hold with bookmender hold end: then all their ledgers are repaired.",
        clears="soon after the bookies are back, at the end of its time, or with bookmender hold "
        "end.",
    ),
    Code.NO_WRITABLE_BOOKIES: Explanation(
        severity="ERROR",
        summary="no bookie accepts writes",
        meaning="All registered bookies are read-only. Clients cannot write, and repairs have no "
        "target.",
        causes="Full disks. Bookies that were switched to read-only by hand.",
        action="Free disk space, end the read-only mode, or add a bookie.",
        clears="when a writable bookie is registered.",
    ),
    Code.BOOKIES_LOST: Explanation(
        severity="WARN; INFO if no ledger names these bookies",
        summary="bookies were absent longer than the recovery delay",
        meaning="These bookies have a cookie or are named by ledgers, but were absent for the "
        "whole recovery delay. Their ledgers are marked, and their copies are written to other "
        "bookies. A bookie that no ledger names any more has only its cookie left.",
        causes="A host or a disk failed. A bookie was stopped without a maintenance window, or "
        "removed without bookmender bookie decommission.",
        action="Start the bookie if its data is intact; that is faster than copying. If it never "
        "returns, wait until no ledger names it, then run bookmender bookie decommission ID.",
        clears="when the bookie registers again or is decommissioned.",
    ),
    Code.BOOKIES_REFORMATTED: Explanation(
        severity="WARN",
        summary="bookies were reformatted, and their ledgers are not marked yet",
        meaning="The cookie of the bookie is newer than ledgers that name it, so the bookie may "
        "have lost their entries. The leader has not marked these ledgers yet.",
        causes="A disk was replaced or formatted. A safety hold, disabled auto-recovery or an "
        "incomplete ledger map delays the marking. After an import of ZooKeeper's data all cookies "
        "look new.",
        action="Remove what prevents the marking; status names it. After an import of ZooKeeper's "
        "data run bookmender bookie trust-identities.",
        clears="when the leader has marked all ledgers of the bookie.",
    ),
    Code.BOOKIES_ABSENT: Explanation(
        severity="WARN",
        summary="bookies are not registered, but not lost yet",
        meaning="The bookies are absent for less than the recovery delay, or for an unknown time. "
        "Their ledgers are not marked yet.",
        causes="A restart, a crash, a network fault, or an expired ZooKeeper session.",
        action="Start the bookie before it counts as lost. Announce planned work with bookmender "
        "bookie maintenance ID --for 2h. If no auditor is running, start one.",
        clears="when the bookie registers again. After the recovery delay it becomes BOOKIES_LOST.",
    ),
    Code.NO_AUDITOR: Explanation(
        severity="UNKNOWN",
        summary="no auditor leads, so losses are not noticed",
        meaning="Neither a bookmender nor a Java auditor is elected. No auditor tracks absent "
        "bookies or marks ledgers, so an empty queue proves nothing.",
        causes="No node is running, or all nodes have auditor.enabled = false. An election takes "
        "some seconds after the leader's session has ended.",
        action="Start a node with bookmender daemon, and auditor.enabled = true.",
        clears="when an auditor is elected.",
    ),
    Code.NO_WORKERS: Explanation(
        severity="ERROR if certain, WARN if Java's workers may be there, INFO if only drains or "
        "repairs by hand wait",
        summary="ledgers are queued and no worker is visible",
        meaning="No bookmender worker is registered. Java's workers are visible only through "
        "their locks, and they never read bookmender's private queue (drains, repairs by hand, "
        "damage that Java does not see).",
        causes="No node is running, or all nodes have replication.enabled = false.",
        action="Start a node with a worker: bookmender daemon.",
        clears="when a worker registers, or the queue is empty.",
    ),
    Code.AUTORECOVERY_DISABLED: Explanation(
        severity="WARN if a bookie is lost or reformatted or a ledger needs repair, else INFO",
        summary="auto-recovery is switched off",
        meaning="Auto-recovery was switched off for the whole cluster. Neither bookmender nor Java "
        "marks or repairs ledgers.",
        causes="bookmender disable, or BookKeeper's shell (autorecovery -disable), often during "
        "an upgrade.",
        action="When the work is done, run bookmender enable.",
        clears="with bookmender enable.",
    ),
    Code.REPAIRS_BLOCKED: Explanation(
        severity="ERROR if all queued ledgers are blocked, else WARN",
        summary="time alone does not help some queued ledgers",
        meaning="Workers tried these ledgers and found an obstacle that needs a bookie or a "
        "person. They try again from time to time. The fact counts the reasons.",
        causes="no-copy, no-coverage: bookies with the needed copies are absent. no-target: too "
        "few bookies accept copies. misplaced: no bookie in the wanted place accepts copies. "
        "end-unproven, recovery-unended: the last entry of an open ledger is not proven. "
        "end-damaged: an entry at the end of an open ledger has damaged copies only. "
        "digest-suspect: no copy matches the digest. corrupt-metadata, access-denied, "
        "write-refused: the metadata is damaged or an ACL denies access. journal-unwritable: the "
        "state directory of a node is full, hangs or is not writable.",
        action="bookmender queue list shows the reason of each ledger, bookmender plan LEDGER the "
        "details. Start or add bookies, or open the ACL. Then bookmender repair LEDGER tries at "
        "once.",
        clears="when the ledgers are repaired or deleted.",
    ),
    Code.LEDGERS_UNDER_REPLICATED: Explanation(
        severity="WARN",
        summary="ledgers are marked as short of copies",
        meaning="The auditor marked these ledgers because a bookie is lost or reformatted, or a "
        "check found copies missing. Workers lease them one by one, copy the missing entries and "
        "remove the marks.",
        causes="Lost or reformatted bookies, and damage found by checks or fsck.",
        action="Nothing while the number falls. bookmender queue list shows what each ledger "
        "misses. bookmender limits shows the rate limits.",
        clears="when all marks are removed.",
    ),
    Code.LEDGERS_DAMAGED: Explanation(
        severity="WARN",
        summary="ledgers have damage that Java does not see",
        meaning="A check or fsck found missing or bad copies that Java's workers would not "
        "notice. Java would delete the marks, so these ledgers are in bookmender's private queue.",
        causes="Bad disks, lost entries in the middle of a ledger, entries that a crash removed.",
        action="Nothing while a bookmender worker runs. Examine the disks of the named bookies: "
        "bookmender queue list.",
        clears="when the ledgers are repaired.",
    ),
    Code.LEDGER_METADATA_UNREADABLE: Explanation(
        severity="ERROR",
        summary="the metadata of some ledgers cannot be read",
        meaning="The last audit could not read the metadata of these ledgers, or ACLs hide "
        "directories of ledgers from the leader. It is unknown which bookies these ledgers name, "
        "so a drain cannot prove that it is complete. All other ledgers are handled as usual.",
        causes="Damaged znodes, metadata of a newer BookKeeper version, or an ACL that denies "
        "access.",
        action="bookmender ledger show ID shows the error. bookmender ledger restore ID can undo "
        "a bad write of this host. If an ACL denies access, change it with setAcl.",
        clears="when the metadata and the directories are readable, or deleted.",
    ),
    Code.LEDGER_END_UNPROVEN: Explanation(
        severity="ERROR",
        summary="no recovery can prove the last entry of some ledgers",
        meaning="These ledgers are not closed, and no recovery can tell whether later entries "
        "existed. So they are not closed automatically.",
        causes="Several bookies of one ensemble were reformatted before the ledger was closed, or "
        "the ack quorum is 0, so that no client can recover the ledger, not even Java's.",
        action="bookmender ledger show ID shows which bookies could still help. If they never "
        "return, bookmender ledger close ID --accept-loss shows what would be given up. With --yes "
        "it closes the ledger.",
        clears="when the ledgers are closed or deleted.",
    ),
    Code.DRAIN_BLOCKED: Explanation(
        severity="WARN if all ledgers that are left are blocked, else INFO",
        summary="ledgers to drain or to repair by hand are blocked",
        meaning="Nothing is short of copies, but ledgers of a drain or of a repair by hand cannot "
        "be moved. The fact counts the reasons.",
        causes="no-target: too few other bookies accept copies. A ledger has no good copy "
        "elsewhere, or its metadata cannot be written.",
        action="Add bookies, or cancel the drain with bookmender bookie drain ID --cancel. "
        "bookmender queue list shows each ledger.",
        clears="when the ledgers can be moved, or the drain is cancelled.",
    ),
    Code.ORDERS_UNREADABLE: Explanation(
        severity="WARN",
        summary="operator orders cannot be read",
        meaning="The znode of an order cannot be parsed, or an ACL denies access. Nodes keep "
        "the last order that they could read. A node that read none assumes the careful order: a "
        "drain that fences nothing, a maintenance window until a day after the order was written "
        "(without an end if an ACL hides that time), the limits of its settings. An unreadable "
        "hold, or pause of the checks, is always in force. Unreadable trust in identities is not.",
        causes="A znode that was written by hand or by a newer release, or an ACL.",
        action="status names the command that cancels each order. Give the order again afterwards.",
        clears="when the order is replaced or its znode is deleted.",
    ),
    Code.RECORD_UNREADABLE: Explanation(
        severity="WARN",
        summary="records of bookmender cannot be read, so some facts are unknown",
        meaning="A znode below underreplication/bookmender cannot be parsed, or an ACL denies "
        "access. Nothing stops. The content of the record is unknown, so a more severe condition "
        "may be hidden.",
        causes="A znode that was written by hand or by another release, or an ACL.",
        action="Find out what wrote the znode. If an ACL denies access, grant the nodes all "
        "permissions. To remove the record at once, delete its znode. The next run of a check or "
        "of fsck writes its records again: bookmender check run NAME.",
        clears="when the daemon has written the record again, or its znode is deleted. The leader "
        "rewrites its own records within about a minute.",
    ),
    Code.RECOVERY_DELAY_UNREADABLE: Explanation(
        severity="WARN",
        summary="lostBookieRecoveryDelay in ZooKeeper cannot be read",
        meaning="The znode lostBookieRecoveryDelay does not hold a number of seconds, or an ACL "
        "denies access. The leader keeps the last delay that it read. A new leader uses the delay "
        "of the last audit or auditor.lost_bookie_recovery_delay_s, whichever is longer.",
        causes="BookKeeper's shell writes any value that it is given, such as 2h.",
        action="Write a number: bookmender shell lostbookierecoverydelay -set SECONDS.",
        clears="when the znode holds a number, or is deleted.",
    ),
    Code.FEED_STALLED: Explanation(
        severity="WARN",
        summary="the change feed is enabled, but nothing is published in it",
        meaning="Changes of ledgers wait for a minute or longer, and the leader publishes none of "
        "them. Clients of the feed learn of them later. Marks and repairs go on.",
        causes="The bookies of the feed's ledgers are absent, or fewer than needed accept writes. "
        "An ACL of ZooKeeper hides the root of the ledgers from the leader. Bookies or ZooKeeper "
        "are slow. ZooKeeper was restored from a backup. Java's auditor leads.",
        action="status names the cause and the next step. If data of the feed is lost for good, "
        "bookmender feed disable and bookmender feed enable begin it again; then its clients "
        "compare their state with all ledgers.",
        clears="some seconds after the next checkpoint, and when the feed is disabled.",
    ),
    Code.LEDGER_MAP_LOADING: Explanation(
        severity="UNKNOWN",
        summary="the leader has not read all ledger metadata yet",
        meaning="A new leader reads the metadata of every ledger once. Until it is done, it marks "
        "ledgers only as far as it has read, so an empty queue proves nothing.",
        causes="A new leader was elected, or its ZooKeeper session was renewed.",
        action="Wait. status shows how many ledgers are read.",
        clears="when the ledger map is complete.",
    ),
    Code.AVAILABILITY_UNKNOWN: Explanation(
        severity="UNKNOWN",
        summary="several bookies are not registered, and no leader has counted unavailable ledgers",
        meaning="Two or more bookies are absent, lost or in maintenance. Some entries may have "
        "all their copies on these bookies. No leader has counted such ledgers since a bookie "
        "last registered or disappeared.",
        causes="A bookie disappeared some seconds ago, or the leader is Java's auditor, which does "
        "not count.",
        action="Wait some seconds. If Java leads or no auditor runs, start one of the bookies to "
        "be safe.",
        clears="when a bookmender leader has counted, or fewer than two bookies are not "
        "registered.",
    ),
    Code.BOOKIES_IN_MAINTENANCE: Explanation(
        severity="INFO",
        summary="bookies are absent within their maintenance window",
        meaning="An operator announced that these bookies may be absent. Their ledgers are not "
        "marked, and are short of copies until the bookies return.",
        causes="bookmender bookie maintenance ID --for DURATION.",
        action="Start the bookie before its window ends, then run bookmender bookie maintenance "
        "ID --end.",
        clears="when the bookie registers again. After its window the bookie counts as absent or "
        "lost.",
    ),
    Code.BOOKIES_DRAINING: Explanation(
        severity="INFO",
        summary="data is being moved off bookies",
        meaning="An operator ordered a drain. Workers copy the ledgers of these bookies to "
        "others; no copy is missing meanwhile.",
        causes="bookmender bookie drain ID.",
        action="bookmender bookie drain shows what is left. When a bookie is drained, stop it and "
        "run bookmender bookie decommission ID.",
        clears="when no ledger names the bookies, or the drain is cancelled.",
    ),
    Code.FSCK_FOUND_DAMAGE: Explanation(
        severity="WARN until all were marked and no queued ledger needs repair, then INFO",
        summary="an fsck run found ledgers wrong",
        meaning="The last fsck run, or an earlier run at a closer level, found ledgers that need a "
        "repair or an operator. They may have been repaired since; only another run can show that.",
        causes="Lost or damaged copies, reformatted bookies, ledgers on absent bookies.",
        action="DIR/report.html shows the ledgers. bookmender fsck mark DIR marks "
        "those that can be repaired. Then run fsck again.",
        clears="when another run at that level or a closer one finds nothing wrong.",
    ),
    Code.FSCK_INCONCLUSIVE: Explanation(
        severity="INFO",
        summary="an fsck run could not judge some ledgers",
        meaning="fsck found nothing wrong with these ledgers, but could not read everything that "
        "it needed.",
        causes="Bookies that did not answer, unreadable metadata, ledgers whose end cannot be "
        "proven.",
        action="Read the reasons in the report. Make sure that every bookie answers, and run fsck "
        "again.",
        clears="when another run can judge every ledger.",
    ),
}
