"""The answers of BookKeeper's own HTTP paths, for scripts that use them.

The facts are from BookKeeper 4.18: ``org.apache.bookkeeper.server.http.service``. The bodies are
equal to Java's, and so is the layout of its JSON. Differences: an error of ZooKeeper is 503 with
our JSON, where Java answers 404 or 500; and a change needs the token.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import structlog

from auditor.election import current_leader
from daemon.admin_session import AdminSession
from daemon.operations.bookies import registered_bookies
from daemon.operations.checks import BOOKIES, ask_for_audit, force_check
from daemon.operations.decommission import decommission_bookie
from daemon.operations.orders import UNREADABLE_VOTE
from daemon.operations.switch import is_enabled as is_enabled
from daemon.operations.switch import read_recovery_delay, switch_off, switch_on
from ledgers.clock import SystemClock
from ledgers.errors import CorruptionError
from ledgers.model import BookieId
from ledgers.registration import BookieView
from replication.marks import MarkedLedger, marked_ledger_ids, read_marks

log = structlog.get_logger()

NO_LEADER = "No auditor elected"
NO_LEDGERS = "No under replicated ledgers found"
AUDIT_ASKED = "Success trigger audit."
RECOVERY_SENT = "Success send recovery request command."
WRONG_METHOD = "Not found method. Should be {} method"


def to_json(value: Any) -> str:
    """Return JSON as Java's pretty printer lays it out: arrays on one line."""
    if isinstance(value, Mapping):
        if not value:
            return "{ }"
        rows = (f"  {json.dumps(str(k))} : {to_json(v)}" for k, v in value.items())
        return "{\n" + ",\n".join(rows) + "\n}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[ {', '.join(map(to_json, value))} ]" if value else "[ ]"
    return json.dumps(value)


async def set_enabled(cluster: AdminSession, enabled: bool) -> bool:
    """Switch auto-recovery, and return whether it is enabled then."""
    await (switch_on(cluster) if enabled else switch_off(cluster))
    return await is_enabled(cluster)


async def leader(cluster: AdminSession) -> str | None:
    """Return the name of the leader; None if no auditor leads."""
    found = await current_leader(cluster.store, cluster.paths)
    return None if found is None else found.candidate or UNREADABLE_VOTE


async def read_marked(cluster: AdminSession) -> list[int]:
    """Return the ledgers of the queue that Java's workers share."""
    return await marked_ledger_ids(cluster.store, cluster.paths)


async def read_all_marks(cluster: AdminSession) -> list[MarkedLedger]:
    """Return the ledgers of ``read_marked`` with their marks."""
    return await read_marks(cluster.store, cluster.paths, await read_marked(cluster))


def chosen(
    marks: Sequence[MarkedLedger], *, including: str = "", excluding: str = ""
) -> dict[int, list[str]]:
    """Return the missing bookies of the ledgers that miss ``including`` and not ``excluding``.
    Empty texts choose all."""
    missing = {each.ledger_id: list(each.mark.replicas) if each.mark else [] for each in marks}
    return {
        ledger_id: [*map(str, bookies)]
        for ledger_id, bookies in missing.items()
        if (not including or including in bookies) and (not excluding or excluding not in bookies)
    }


def marked_text(ledger_ids: Sequence[int]) -> str:
    """Return the ledgers as JSON; empty if there are none."""
    return to_json(ledger_ids) if ledger_ids else ""


def chosen_text(
    marks: Sequence[MarkedLedger], *, including: str, excluding: str, shows_missing: bool
) -> str:
    """Return the ledgers of ``chosen`` as JSON, with their missing bookies if asked for; empty if
    there are none."""
    found = chosen(marks, including=including, excluding=excluding)
    return to_json(found if shows_missing else list(found)) if found else ""


async def trigger_audit(cluster: AdminSession) -> str:
    """Ask the leader for an audit that treats absent bookies as lost. Return why that is
    impossible; empty if it was done."""
    if not await is_enabled(cluster):
        return "Autorecovery is disabled. So giving up!"
    if await leader(cluster) is None:
        return "No auditor elected, though Autorecovery is enabled. So giving up."
    await force_check(cluster, BOOKIES)
    return ""


async def recovery_delay_s(cluster: AdminSession) -> int | None:
    """Return the recovery delay; None if the znode is missing or is not a number."""
    with suppress(CorruptionError):
        return await read_recovery_delay(cluster)
    return None


async def check_stopped(cluster: AdminSession, bookie: BookieId) -> str:
    """Return why the bookie cannot be decommissioned now; empty if nothing is known against it."""
    if bookie in (await registered_bookies(cluster)).available:
        return f"{bookie} is still registered: stop it for good first"
    return ""


async def decommission(cluster: AdminSession, bookie: BookieId, *, deletes_cookie: bool) -> None:
    """Have the bookie's ledgers marked. With ``deletes_cookie``, also wait until no ledger names
    the bookie, and delete its cookie, as ``bookmender bookie decommission`` does. That may take
    hours.
    """
    if not deletes_cookie:
        await ask_for_audit(cluster)
        return
    log.info("decommission.began", bookie=bookie)
    done = await decommission_bookie(
        cluster, bookie, notify=_log_told, show=_show_nothing, clock=SystemClock()
    )
    log.info("decommission.finished", bookie=bookie, moved_ledger_count=done.ledgers_moved)


def _log_told(text: str) -> None:
    log.warning("decommission.delayed", why=text)


def _show_nothing(left: int, *, waiting: int = 0, beside: str = "") -> None:
    pass


async def read_view(cluster: AdminSession) -> BookieView:
    return await registered_bookies(cluster)


def bookies(view: BookieView, *, read_only: bool, with_hosts: bool) -> dict[BookieId, str | None]:
    """Return the writable or the read-only bookies, with the host of each if asked for."""
    shown = view.read_only if read_only else view.writable
    return {bookie: _host(view, bookie) if with_hosts else None for bookie in sorted(shown)}


def _host(view: BookieView, bookie: BookieId) -> str | None:
    address = view.address(bookie)
    return bookie.rpartition(":")[0] if address is None else address.host
