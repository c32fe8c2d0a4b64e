"""Trust in bookies whose cookies are newer than their ledgers: shows, gives and withdraws it."""

from collections.abc import Sequence

from daemon.admin_session import AdminSession, order_event, shared_clock
from daemon.answers import Answer
from daemon.operations.orders import withdraw_order
from ledgers.model import BookieId
from ledgers.registration import HIDDEN_CZXID
from replication.orders import IdentitiesOrder, OrderStore, identities_znode


class IdentityRecord(Answer, frozen=True, kw_only=True):
    """The cookie of a bookie. ``is_trusted``: the order names this cookie."""

    cookie_czxid: int
    is_trusted: bool


class Identities(Answer, frozen=True, kw_only=True):
    """The bookies' present cookies, and which of them are trusted."""

    has_changed: bool
    bookies: dict[BookieId, IdentityRecord]


async def read_identities(cluster: AdminSession, *, has_changed: bool = False) -> Identities:
    """Read all cookies and the order. Raises UnavailableError."""
    trusted = (await OrderStore(cluster.store, cluster.paths).read()).trusted_cookies
    return Identities(
        has_changed=has_changed,
        bookies={
            bookie: IdentityRecord(cookie_czxid=czxid, is_trusted=trusted.get(bookie) == czxid)
            for bookie, czxid in sorted((await _cookies(cluster)).items())
        },
    )


async def give_trust(cluster: AdminSession, bookies: Sequence[BookieId] | None) -> None:
    """Trust the present cookies of these bookies, or of all if ``bookies`` is None.

    Bookies of an existing order stay trusted. Raises ConflictError.
    """
    order_store, znode = OrderStore(cluster.store, cluster.paths), identities_znode(cluster.paths)
    stored = await order_store.stored(znode)
    before = {} if stored is None or stored.value is None else stored.value.cookies
    cookies = await _cookies(cluster)
    added = cookies if bookies is None else {b: cookies[b] for b in bookies if b in cookies}
    clock = await shared_clock(cluster)
    trusted = IdentitiesOrder(since_ms=clock.wall_ms(), cookies={**before, **added})
    await order_store.give(znode, trusted, over=stored)
    await cluster.note_order(order_event("bookie trust-identities", bookies=tuple(sorted(added))))


async def withdraw_trust(cluster: AdminSession) -> None:
    """Withdraw the order, if there is one. Raises ConflictError."""
    event = order_event("bookie trust-identities --withdraw")
    await withdraw_order(cluster, identities_znode(cluster.paths), event)


async def _cookies(cluster: AdminSession) -> dict[BookieId, int]:
    """Return the czxid of each cookie. Cookies that ACLs hide are left out: their age is
    unknown."""
    cookies = await cluster.registration.cookies()
    return {b: stat.czxid for b, stat in cookies.items() if stat.czxid != HIDDEN_CZXID}
