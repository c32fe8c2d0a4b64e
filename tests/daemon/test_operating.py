"""Drains and maintenance windows as operators order them, and what is shown of each bookie."""

import asyncio
import json
from dataclasses import replace

import click
import pytest
from click.testing import CliRunner

from auditor.records import DrainProgress
from daemon.operating import drain_command
from daemon.operating.bookie_ids import BookieArgument, hint, known_bookies, require_known
from daemon.operating.bookies import (
    BookieRow,
    BookieState,
    gather_bookies,
    maintenance_text,
)
from daemon.operating.drains import (
    Drains,
    cancel_drains,
    concerns,
    order_drains,
    read_drains,
    wait_drained,
)
from daemon.operating.maintenance_command import (
    Duration,
    WindowReason,
    end_window,
    open_window,
    read_windows,
)
from daemon.operating.maintenance_command import concerns as window_concerns
from ledgers.bookies import Room
from ledgers.errors import CorruptionError
from ledgers.metadata import BookieId
from replication.cluster.membership import Half, Membership
from replication.cluster.order_book import OrderBook, drain_place, maintenance_place
from replication.cluster.orders import DrainOrder, MaintenanceWindow, Orders
from replication.queue import payloads
from tests.auditor.auditing import draining, leading
from tests.auditor.scenes import with_ledgers
from tests.daemon.visits import Heard, visiting
from tests.replication.cluster import Cluster, in_virtual_time
from tests.replication.ledger_values import B1, B2, B3, B4, BOOKIES
from tests.replication.nodes import ROOT, UR, node_info


async def order_drain(cluster: Cluster, *bookies: BookieId, may_fence: bool | None = None) -> None:
    await order_drains(visiting(cluster), bookies, may_fence=may_fence, clock=cluster.clock)


# --- Which bookie is meant -------------------------------------------------------------------------


@in_virtual_time
async def test_a_bookie_is_known_that_is_there_or_was_ever_set_up_or_is_named_by_an_order() -> None:
    cluster = await Cluster.start(B1, B2)
    await cluster.kill(B2)
    gone, without_cookie = BookieId("gone:1"), BookieId("new:1")
    await OrderBook(cluster.store, UR).give(
        drain_place(UR, gone), DrainOrder(since_ms=1), over=None
    )
    await cluster.store.create(f"{ROOT}/available/{without_cookie}")

    assert await known_bookies(visiting(cluster)) == {B1, B2, gone, without_cookie}


def test_a_near_miss_is_answered_with_what_may_have_been_meant() -> None:
    known = [BookieId("10.0.0.1:3181"), BookieId("storage-7:3181")]

    with pytest.raises(click.UsageError, match=r"did you mean 10\.0\.0\.1:3181"):
        require_known([known[0], BookieId("10.0.0.1:3811")], known)
    require_known(known, known)
    assert "bookie list" in hint(BookieId("nothing like it"), known)
    assert "none at all" in hint(known[0], [])


def test_what_cannot_be_an_id_is_no_argument() -> None:
    with pytest.raises(click.BadParameter):
        BookieArgument().convert("no spaces please", None, None)


# --- Drains ----------------------------------------------------------------------------------------


@in_virtual_time
async def test_a_drain_that_is_ordered_again_goes_on_under_the_new_terms() -> None:
    cluster = await Cluster.start()
    await order_drain(cluster, B1)
    first = (await OrderBook(cluster.store, UR).read()).draining[B1]
    await asyncio.sleep(10)

    await order_drain(cluster, B1, B2, may_fence=True)

    draining_now = (await OrderBook(cluster.store, UR).read()).draining
    assert draining_now[B1] == DrainOrder(since_ms=first.since_ms, may_fence=True)
    assert draining_now[B2].since_ms > first.since_ms

    await order_drain(cluster, B1, may_fence=None)
    assert (await OrderBook(cluster.store, UR).read()).draining[B1].may_fence, "as it stands"
    await order_drain(cluster, B1, may_fence=False)
    assert not (await OrderBook(cluster.store, UR).read()).draining[B1].may_fence


@in_virtual_time
async def test_a_later_releases_drain_is_taken_back_but_not_overwritten() -> None:
    cluster = await Cluster.start()
    await cluster.store.create(drain_place(UR, B1).path, b"{}", with_parents=True)

    with pytest.raises(CorruptionError, match="--cancel"):
        await order_drain(cluster, B1)

    assert await cancel_drains(visiting(cluster), [B1, B2]) == [B1]
    assert await cluster.store.exists(drain_place(UR, B1).path) is None


@in_virtual_time
async def test_waiting_for_a_drain_ends_when_no_ledger_names_the_bookie() -> None:
    cluster = await with_ledgers((B1, B2), (B1, B3))
    await order_drain(cluster, B1, B4)
    heard = Heard()
    async with draining(cluster):
        waiting = asyncio.create_task(
            wait_drained(visiting(cluster), [B1], show=heard.show, clock=cluster.clock)
        )
        await asyncio.sleep(30)
        assert not waiting.done()
        for ledger_id in (0, 1):
            await cluster.store.delete(cluster.manager.path(ledger_id))
            await _unmark(cluster, ledger_id)
        drains = await asyncio.wait_for(waiting, 100)

    assert drains.are_drained([B1])
    assert drains.orders.draining.keys() == {B1}, "of the other nobody asked"
    assert heard.left[0] == 2


@in_virtual_time
async def test_waiting_for_a_drain_ends_when_its_order_is_taken_back() -> None:
    cluster = await with_ledgers((B1, B2))
    await order_drain(cluster, B1)
    waiting = asyncio.create_task(
        wait_drained(visiting(cluster), [B1], show=Heard().show, clock=cluster.clock)
    )
    await asyncio.sleep(10)
    assert not waiting.done(), "nobody has looked for its ledgers yet"

    await cancel_drains(visiting(cluster), [B1])
    drains = await asyncio.wait_for(waiting, 10)

    assert not drains.are_drained([B1])


@in_virtual_time
async def test_progress_of_an_earlier_order_is_not_that_of_this_one() -> None:
    cluster = await with_ledgers((B2, B3))
    await order_drain(cluster, B1)
    async with draining(cluster):
        await asyncio.sleep(1)
        assert (await read_drains(visiting(cluster))).are_drained([B1])
    await cancel_drains(visiting(cluster), [B1])
    await asyncio.sleep(1)

    await order_drain(cluster, B1)

    drains = await read_drains(visiting(cluster))
    assert not drains.are_drained([B1])
    assert drains.ledgers_left is None


@pytest.mark.parametrize(
    ("progress", "text"),
    [
        pytest.param({}, "draining (not looked for yet)", id="no leader has looked"),
        pytest.param({B1: (5, 1_000, False)}, "draining (5 of 1,000 ledgers left)", id="under way"),
        pytest.param(
            {B1: (0, 9, False)}, "draining (0 of 9 ledgers left)", id="not proven to be empty yet"
        ),
        pytest.param({B1: (0, 9, True)}, "drained", id="empty"),
    ],
)
def test_a_drain_says_how_far_it_is(
    progress: dict[BookieId, tuple[int, int, bool]], text: str
) -> None:
    told = {
        b: DrainProgress(since_ms=1, ledgers_left=left, ledgers_most=most, is_drained=is_drained)
        for b, (left, most, is_drained) in progress.items()
    }

    row = BookieRow(
        bookie=B1,
        state=BookieState.READ_ONLY,
        has_cookie=True,
        drain=DrainOrder(since_ms=1),
        progress=told.get(B1),
    )

    assert row.to_text(now_ms=0) == f"{B1}: read-only, {text}"


IN_DOUBT = DrainProgress(
    since_ms=1,
    ledgers_left=0,
    ledgers_most=9,
    is_drained=False,
    is_in_doubt=True,
    unreadable_count=23,
    unreadable=(4, 7),
)


def drains_of(**progress: DrainProgress) -> Drains:
    orders = Orders(draining={BookieId(b): DrainOrder(since_ms=1) for b in progress})
    return Drains(orders=orders, progress={BookieId(b): told for b, told in progress.items()})


def test_a_drain_in_doubt_says_which_ledgers_cannot_be_read_for_people_and_for_programs() -> None:
    drains = drains_of(b1=IN_DOUBT)

    assert drains.to_text() == (
        "b1: in doubt: 23 ledgers that cannot be read may name it: 4, 7 and more; "
        "bookmender ledger show ID says what is wrong"
    )
    record = drains.to_json()["bookies"]["b1"]
    assert (record["is_drained"], record["is_in_doubt"]) == (False, True)
    assert (record["unreadable_count"], record["unreadable"]) == (23, [4, 7])


def test_ledgers_that_cannot_be_read_are_named_while_others_move() -> None:
    under_way = replace(
        IN_DOUBT, ledgers_left=5, is_in_doubt=False, unreadable_count=2, unreadable=(4, 7)
    )

    assert drains_of(b1=under_way).to_text() == (
        "b1: draining (5 of 9 ledgers left); 2 ledgers that cannot be read may name it: 4, 7; "
        "bookmender ledger show ID says what is wrong"
    )


DRAINED = DrainProgress(since_ms=1, ledgers_left=0, ledgers_most=9, is_drained=True)
UNDER_WAY = replace(DRAINED, ledgers_left=3, is_drained=False)


@pytest.mark.parametrize(
    ("progress", "exit_code"),
    [
        pytest.param({}, 0, id="nothing to drain"),
        pytest.param({"b1": DRAINED, "b2": DRAINED}, 0, id="all drained"),
        pytest.param({"b1": DRAINED, "b2": UNDER_WAY}, 1, id="one under way"),
        pytest.param({"b1": IN_DOUBT, "b2": UNDER_WAY}, 1, id="one in doubt, one under way"),
        pytest.param({"b1": IN_DOUBT, "b2": DRAINED}, 3, id="nothing is left but doubt"),
    ],
)
def test_the_exit_code_says_whether_all_is_drained(
    progress: dict[str, DrainProgress], exit_code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain_command, "run_visit", lambda config, act: drains_of(**progress))

    result = CliRunner().invoke(drain_command.drain, [])

    assert result.exit_code == exit_code, result.output


@in_virtual_time
async def test_waiting_for_a_drain_ends_when_nothing_is_left_but_doubt() -> None:
    cluster = await with_ledgers((B1, B2), (B2, B3))
    await cluster.store.set(cluster.manager.path(1), b"?" + B1.encode(), version=-1)
    await order_drain(cluster, B1)
    async with draining(cluster):
        waiting = asyncio.create_task(
            wait_drained(visiting(cluster), [B1], show=Heard().show, clock=cluster.clock)
        )
        await asyncio.sleep(30)
        assert not waiting.done(), "a ledger moves still"
        await cluster.store.delete(cluster.manager.path(0))
        await _unmark(cluster, 0)
        drains = await asyncio.wait_for(waiting, 100)

    assert not drains.are_drained([B1])
    assert drains.progress[B1].unreadable == (1,)


@in_virtual_time
async def test_no_drain_at_all_is_said_too() -> None:
    cluster = await Cluster.start()

    drains = await read_drains(visiting(cluster))

    assert drains.to_text() == "no bookie is being drained"
    assert drains.to_json() == {"bookies": {}, "unreadable_orders": []}


@in_virtual_time
async def test_what_keeps_a_drain_from_its_end_is_said_with_what_to_do() -> None:
    cluster = await Cluster.start(B1, B2)
    here = visiting(cluster)

    writable, no_leader = await concerns(here, [B1])
    assert f"{B1} still takes writes" in writable
    assert "readonly" in writable
    assert "no auditor is running" in no_leader

    *_, alone, _ = await concerns(here, [B1, B2])
    assert "no other writable bookie is left" in alone

    await cluster.unregister(B1)
    await cluster.register(B1, is_read_only=True)
    async with leading(cluster):
        assert await concerns(here, [B1]) == []
        await cluster.store.create(payloads.disable_path(UR))
        assert await concerns(here, [B1]) == [
            "auto-recovery is disabled, so nothing moves: bookmender enable"
        ]


@in_virtual_time
async def test_a_leader_that_knows_no_drains_is_named() -> None:
    cluster = await Cluster.start(B1, B2)
    await Membership.join(cluster.store, UR, node_info("node-1", Half.WORKER))
    java = visiting(cluster).store
    await java.create(
        f"{payloads.election_path(UR)}/V_",
        payloads.vote_to_bytes("java-1:3181"),
        is_ephemeral=True,
        is_sequential=True,
    )

    assert "Java's AutoRecovery (java-1:3181)" in (await concerns(visiting(cluster), [B1]))[-1]


# --- Maintenance -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "duration_s"),
    [("1s", 1), ("90s", 90), ("30m", 1_800), ("2h", 7_200), ("1h30m", 5_400), ("30d", 2_592_000)],
)
def test_a_duration_is_numbers_with_their_units(text: str, duration_s: int) -> None:
    assert Duration().convert(text, None, None) == duration_s


@pytest.mark.parametrize(
    "text",
    [
        *("", "30", "h", "0s", "31d", "1.5h", "-1h", "2 h", "2w", "1h foo"),
        pytest.param("٣m", id="another script's digit"),
        pytest.param("9" * 5_000 + "s", id="more digits than Python reads"),
    ],
)
def test_what_is_no_duration_or_too_long_for_one_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter):
        Duration().convert(text, None, None)


@pytest.mark.parametrize("text", ["", "new disks", "für Größeres ٣", "x" * 200])
def test_a_reason_is_a_line_of_text(text: str) -> None:
    assert WindowReason().convert(text, None, None) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        pytest.param("a\x1b[2Jb", r"a\x1b[2Jb", id="a terminal's command"),
        pytest.param("a\nb", r"a\nb", id="two lines"),
        pytest.param("a\u202eb", r"a\u202eb", id="right to left"),
        pytest.param("a\udcffb", r"a\udcffb", id="no text at all"),
        pytest.param("x" * 201, "not 201", id="too long"),
    ],
)
def test_a_reason_that_would_play_tricks_on_a_terminal_is_refused_and_shown_escaped(
    text: str, shown: str
) -> None:
    with pytest.raises(click.BadParameter) as refused:
        WindowReason().convert(text, None, None)

    assert shown in refused.value.message
    assert refused.value.message.isprintable()


def test_a_reason_that_got_in_by_another_way_is_shown_escaped() -> None:
    window = MaintenanceWindow(since_ms=0, until_ms=60_000, reason="für\x1b[2J\udcff")

    assert maintenance_text(window, now_ms=0) == (
        r"under maintenance for another 1 min (für\x1b[2J\udcff)"
    )


@in_virtual_time
async def test_a_window_is_replaced_by_the_next_and_ended_by_hand() -> None:
    cluster = await Cluster.start()
    here = visiting(cluster)
    first = await open_window(here, B1, duration_s=60, reason="disk", clock=cluster.clock)
    second = await open_window(here, B1, duration_s=600, reason="", clock=cluster.clock)
    assert first.until_ms < second.until_ms
    assert await read_windows(here, cluster.clock) == {B1: second}

    assert await end_window(here, B1)
    assert not await end_window(here, B1)
    assert await read_windows(here, cluster.clock) == {}


@in_virtual_time
async def test_windows_that_are_over_are_deleted_by_who_looks() -> None:
    cluster = await Cluster.start()
    here = visiting(cluster)
    await open_window(here, B1, duration_s=60, reason="", clock=cluster.clock)
    standing = await open_window(here, B2, duration_s=600, reason="", clock=cluster.clock)
    await asyncio.sleep(61)

    assert await read_windows(here, cluster.clock) == {B2: standing}

    assert await cluster.store.exists(maintenance_place(UR, B1).path) is None


@in_virtual_time
async def test_a_window_that_comes_too_late_says_so() -> None:
    cluster = await with_ledgers((B1, B2), (B1, B3))
    here = visiting(cluster)
    await cluster.mark(B1, ledger_id=0)
    assert await window_concerns(here, B1) == [], "it is there"

    await cluster.kill(B1, B2)

    (concern,) = await window_concerns(here, B1)
    assert f"{B1} is lost already, with 1 ledger marked" in concern
    assert await window_concerns(here, B2) == []


# --- What is shown of each -------------------------------------------------------------------------


@in_virtual_time
async def test_the_list_tells_state_and_orders_of_every_bookie() -> None:
    cluster = await Cluster.start(B1, B2, B3)
    here = visiting(cluster)
    await cluster.unregister(B2)
    await cluster.register(B2, is_read_only=True)
    await cluster.kill(B3)
    await order_drain(cluster, B2)
    await open_window(here, B3, duration_s=3_600, reason="disk", clock=cluster.clock)

    rows = await gather_bookies(here, clock=cluster.clock)

    texts = [row.to_text(now_ms=cluster.clock.wall_ms()) for row in rows]
    assert texts == [
        f"{B1}: writable",
        f"{B2}: read-only, draining (not looked for yet)",
        f"{B3}: away, under maintenance for another 1 h (disk)",
    ]
    records = json.loads(json.dumps([row.to_json() for row in rows]))
    assert [record["state"] for record in records] == ["writable", "read-only", "away"]
    assert records[1]["drain"]["ledgers_left"] is None
    assert records[2]["maintenance"]["reason"] == "disk"


@in_virtual_time
async def test_with_no_bookie_there_at_all_the_list_still_tells_of_them() -> None:
    cluster = await Cluster.start()
    for bookie in BOOKIES:
        await cluster.unregister(bookie)

    rows = await gather_bookies(visiting(cluster), clock=cluster.clock)

    assert {row.bookie: row.state for row in rows} == dict.fromkeys(BOOKIES, BookieState.AWAY)


def test_free_room_is_shown_where_the_bookie_told_it() -> None:
    row = BookieRow(
        bookie=B1,
        has_cookie=True,
        state=BookieState.WRITABLE,
        room=Room(free_bytes=2**30, total_bytes=4 * 2**30),
        maintenance=MaintenanceWindow(since_ms=0, until_ms=60_000),
    )

    text = row.to_text(now_ms=0)

    assert text == f"{B1}: writable, under maintenance for another 1 min, 25% of 4.0 GiB free"


async def _unmark(cluster: Cluster, ledger_id: int) -> None:
    path = payloads.mark_path(f"{UR}/bookmender", ledger_id)
    await cluster.store.delete(path)
    await cluster.store.delete(path.rpartition("/")[0])
