"""Names of bookies, maintenance windows as operators order them, and the list of bookies."""

import asyncio
from typing import Any

import click
import pytest

from daemon.cli.bookie import list_text, parse_states
from daemon.cli.option_types import BookieArgument, Duration, ReasonText
from daemon.operations.bookies import (
    BookieRow,
    BookieState,
    chosen_rows,
    gather_bookies,
    hint,
    known_bookies,
    maintenance_text,
    require_known,
)
from daemon.operations.errors import UnknownBookieError
from daemon.operations.maintenance import concerns as window_concerns
from daemon.operations.maintenance import end_window, open_window, read_windows
from ledgers.bookies import DiskSpace
from ledgers.errors import BookmenderError, UnauthorizedError, UnavailableError
from ledgers.model import BookieId
from replication import znodes
from replication.orders import (
    DrainOrder,
    MaintenanceWindow,
    OrderStore,
    drain_znode,
    maintenance_znode,
)
from replication.racks import StoredRacks
from tests.auditor.auditing import auditing
from tests.auditor.scenes import DELAY, delayed, with_ledgers
from tests.daemon.visits import order_drain, visiting
from tests.replication.cluster import Cluster, in_virtual_time, shut_out
from tests.replication.ledger_values import B1, B2, B3, B4, BOOKIES
from tests.replication.nodes import PATHS, ROOT
from tests.said import Said

# --- Names of bookies -----------------------------------------------------------------------------


@in_virtual_time
async def test_known_bookies_are_registered_or_have_a_cookie_or_order() -> None:
    cluster = await Cluster.start(B1, B2)
    await cluster.kill(B2)
    gone, without_cookie = BookieId("gone:1"), BookieId("new:1")
    await OrderStore(cluster.store, PATHS).give(
        drain_znode(PATHS, gone), DrainOrder(since_ms=1), over=None
    )
    await cluster.store.create(f"{ROOT}/available/{without_cookie}")

    assert await known_bookies(visiting(cluster)) == {B1, B2, gone, without_cookie}


def test_a_mistyped_bookie_gets_a_suggestion() -> None:
    known = [BookieId("10.0.0.1:3181"), BookieId("storage-7:3181")]

    with pytest.raises(UnknownBookieError, match=r"Did you mean 10\.0\.0\.1:3181"):
        require_known([known[0], BookieId("10.0.0.1:3811")], known)
    require_known(known, known)
    assert "bookie list" in hint(BookieId("nothing like it"), known)
    assert "no bookies at all" in hint(known[0], [])
    assert "Its port is not between 1 and 65535." in hint(BookieId("10.0.0.1:99999"), known)
    assert "port" not in hint(BookieId("10.0.0.1:3811"), known)


def test_a_malformed_bookie_id_is_refused() -> None:
    with pytest.raises(click.BadParameter):
        BookieArgument().convert("no spaces please", None, None)


# --- Maintenance ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "duration_s"),
    [("1s", 1), ("90s", 90), ("30m", 1_800), ("2h", 7_200), ("1h30m", 5_400), ("30d", 2_592_000)],
)
def test_a_duration_is_numbers_with_units(text: str, duration_s: int) -> None:
    assert Duration().convert(text, None, None) == duration_s


@pytest.mark.parametrize(
    ("text", "told"),
    [
        *(
            (text, "not a duration")
            for text in ("", "30", "h", "1.5h", "-1h", "2 h", "2w", "1h foo")
        ),
        pytest.param("٣m", "not a duration", id="another script's digit"),
        ("0s", "too short. The shortest duration is 1s"),
        ("31d", "too long. The longest duration is 30d"),
        pytest.param("9999999999h", "too long", id="more digits than any duration has"),
        pytest.param("9" * 5_000 + "s", "too long", id="more digits than Python reads"),
        ("000000000001s5d26d", "too long"),
    ],
)
def test_a_duration_out_of_range_is_refused_with_the_reason(text: str, told: str) -> None:
    with pytest.raises(click.BadParameter) as refused:
        Duration().convert(text, None, None)

    assert told in refused.value.message
    assert len(refused.value.message) < 120


@pytest.mark.parametrize("text", ["", "new disks", "für Größeres ٣", "x" * 200])
def test_a_reason_is_a_line_of_text(text: str) -> None:
    assert ReasonText().convert(text, None, None) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        pytest.param("a\x1b[2Jb", r"a\x1b[2Jb", id="a terminal's control sequence"),
        pytest.param("a\nb", r"a\nb", id="two lines"),
        pytest.param("a\u202eb", r"a\u202eb", id="right to left"),
        pytest.param("a\udcffb", r"a\udcffb", id="not text"),
        pytest.param("x" * 201, "201 characters", id="too long"),
    ],
)
def test_a_reason_with_control_characters_is_refused(text: str, shown: str) -> None:
    with pytest.raises(click.BadParameter) as refused:
        ReasonText().convert(text, None, None)

    assert shown in refused.value.message
    assert refused.value.message.isprintable()


def test_a_stored_reason_is_shown_escaped() -> None:
    window = MaintenanceWindow(since_ms=0, until_ms=60_000, reason="für\x1b[2J\udcff")

    assert maintenance_text(window, now_ms=0) == (
        r"in maintenance for another 1 min (für\x1b[2J\udcff)"
    )


@in_virtual_time
async def test_a_window_can_be_replaced_and_ended() -> None:
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
async def test_expired_windows_are_deleted_when_they_are_read() -> None:
    cluster = await Cluster.start()
    here = visiting(cluster)
    await open_window(here, B1, duration_s=60, reason="", clock=cluster.clock)
    window = await open_window(here, B2, duration_s=600, reason="", clock=cluster.clock)
    await asyncio.sleep(61)

    assert await read_windows(here, cluster.clock) == {B2: window}

    assert await cluster.store.exists(maintenance_znode(PATHS, B1).path) is None


@pytest.mark.parametrize("error", [UnauthorizedError, UnavailableError])
@in_virtual_time
async def test_a_failure_to_delete_an_expired_window_is_ignored(
    error: type[BookmenderError], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = await Cluster.start()
    here = visiting(cluster)
    await open_window(here, B1, duration_s=60, reason="", clock=cluster.clock)
    window = await open_window(here, B2, duration_s=600, reason="", clock=cluster.clock)
    await asyncio.sleep(61)

    async def refuse(*_: object, **__: object) -> None:
        raise error("not now")

    monkeypatch.setattr(here.store, "delete", refuse)
    monkeypatch.setattr(here.store, "multi", refuse)

    assert await read_windows(here, cluster.clock) == {B2: window}


@in_virtual_time
async def test_a_window_for_a_lost_bookie_gets_a_warning() -> None:
    cluster = await with_ledgers((B1, B2), (B1, B3))
    here = visiting(cluster)
    await cluster.mark(B1, ledger_id=0)
    assert await window_concerns(here, B1, clock=cluster.clock) == [], "it is registered"

    await cluster.kill(B1, B2)

    (concern,) = await window_concerns(here, B1, clock=cluster.clock)
    assert f"{B1} is already lost, and 1 ledger is marked" in concern
    assert await window_concerns(here, B2, clock=cluster.clock) == []

    shut_out(here.store, PATHS.mark(0))
    assert await window_concerns(here, B2, clock=cluster.clock) == [
        f"1 unreadable mark may name {B2}: bookmender queue shows the ledgers."
    ]


# --- The list of bookies --------------------------------------------------------------------------


@in_virtual_time
async def test_the_list_has_state_and_orders_of_every_bookie() -> None:
    cluster = await Cluster.start(B1, B2, B3)
    here = visiting(cluster)
    await cluster.unregister(B2)
    await cluster.register(B2, is_read_only=True)
    await cluster.kill(B3)
    await order_drain(cluster, B2)
    await open_window(here, B3, duration_s=3_600, reason="disk", clock=cluster.clock)

    rows, _ = await gather_bookies(here, clock=cluster.clock)

    texts = [row.to_text(now_ms=cluster.clock.wall_ms()) for row in rows]
    assert texts == [
        f"{B1}: writable",
        f"{B2}: read-only, draining (its ledgers are not counted yet)",
        f"{B3}: absent, in maintenance for another 1 h (disk)",
    ]
    drain, window = rows[1].record().drain, rows[2].record().maintenance
    assert drain is not None
    assert drain.ledgers_left is None
    assert window is not None
    assert window.reason == "disk"


@in_virtual_time
async def test_the_list_and_status_agree_on_lost_bookies() -> None:
    cluster = await with_ledgers((B1, B2))
    listed = await states_listed(cluster)
    await cluster.kill(B1)
    nobody_counts = await states_listed(cluster)
    delay = znodes.recovery_delay_to_bytes(100)
    await cluster.store.create(DELAY, delay, with_parents=True)
    nobody_knows = await states_listed(cluster)
    async with auditing(cluster, settings=delayed(100)):
        await cluster.kill(B2)
        await asyncio.sleep(60)
        away = await states_listed(cluster)
        await asyncio.sleep(60)
        lost = await states_listed(cluster)

    assert (listed[B1], listed[B2]) == ("writable", "writable")
    assert nobody_counts[B1] == "lost"
    assert nobody_knows[B1] == "absent", "no auditor knows since when"
    assert away[B2] == "absent, lost in 40 s"
    assert lost[B2] == "lost"


async def states_listed(cluster: Cluster) -> dict[BookieId, str]:
    rows, _ = await gather_bookies(visiting(cluster), clock=cluster.clock)
    now_ms = cluster.clock.wall_ms()
    return {row.bookie: row.to_text(now_ms=now_ms).partition(": ")[2] for row in rows}


@in_virtual_time
async def test_the_list_has_bookies_even_if_none_is_registered() -> None:
    cluster = await Cluster.start()
    for bookie in BOOKIES:
        await cluster.unregister(bookie)

    rows, _ = await gather_bookies(visiting(cluster), clock=cluster.clock)

    assert {row.bookie: row.state for row in rows} == dict.fromkeys(BOOKIES, BookieState.ABSENT)


@in_virtual_time
async def test_the_list_has_racks_times_and_ledgers_that_are_left() -> None:
    cluster = await with_ledgers((B1, B2), (B1, B3))
    racks = StoredRacks(racks={B1: "/east/1"}).to_json()
    await cluster.store.create(PATHS.racks, racks, with_parents=True)
    began_ms = cluster.clock.wall_ms()

    async with auditing(cluster, settings=delayed(100)):
        await asyncio.sleep(5)
        await cluster.kill(B1)
        await asyncio.sleep(60)
        rows, _ = await gather_bookies(visiting(cluster), clock=cluster.clock)

    lost, there = rows[0], rows[1]
    assert (lost.rack, lost.ledgers_left) == ("/east/1", 2)
    assert lost.since_ms is not None
    assert lost.since_ms > began_ms
    assert (there.rack, there.ledgers_left) == (None, None)
    assert there.since_ms is not None
    assert there.since_ms <= began_ms


NOW_MS = 10_000_000
LISTED = [
    BookieRow(bookie=B1, has_cookie=True, state=BookieState.WRITABLE, since_ms=NOW_MS - 9_000_000),
    BookieRow(
        bookie=B2,
        has_cookie=True,
        state=BookieState.LOST,
        since_ms=NOW_MS - 90_000,
        rack="/east/1",
        ledgers_left=1_200,
    ),
    BookieRow(
        bookie=B3,
        has_cookie=True,
        state=BookieState.ABSENT,
        rack="/east/2",
        loss_due_ms=NOW_MS + 5_000,
        maintenance=MaintenanceWindow(since_ms=0, until_ms=NOW_MS + 60_000),
    ),
    BookieRow(
        bookie=B4,
        has_cookie=True,
        state=BookieState.READ_ONLY,
        since_ms=NOW_MS - 1_000,
        rack="/west/1",
        drain=DrainOrder(since_ms=0),
        disk_space=DiskSpace(free_bytes=1 << 30, total_bytes=4 << 30),
    ),
]


@pytest.mark.parametrize(
    ("chosen", "bookies"),
    [
        pytest.param({}, [B2, B3, B4, B1], id="the worst first"),
        pytest.param({"sort": "id"}, [B1, B2, B3, B4], id="by ID"),
        pytest.param({"sort": "since"}, [B4, B2, B1, B3], id="the latest change first"),
        pytest.param({"sort": "space"}, [B4, B1, B2, B3], id="the fullest first"),
        pytest.param({"sort": "rack", "rack": "/east"}, [B2, B3], id="of a region, by rack"),
        pytest.param({"rack": "/east/2"}, [B3], id="of a rack"),
        pytest.param({"rack": "/eas"}, [], id="a part of a name is no rack"),
        pytest.param({"states": parse_states("read-only,lost")}, [B2, B4], id="of two states"),
    ],
)
def test_the_list_is_filtered_and_sorted(chosen: dict[str, Any], bookies: list[BookieId]) -> None:
    assert [row.bookie for row in chosen_rows(LISTED, **chosen)] == bookies


def test_the_list_is_a_table(said: Said) -> None:
    east = chosen_rows(LISTED, rack="/east")
    writable = chosen_rows(LISTED, states=parse_states("writable"))

    said(
        "bookies",
        {
            "all": list_text(chosen_rows(LISTED), LISTED, now_ms=NOW_MS),
            "of a region": list_text(east, LISTED, now_ms=NOW_MS),
            "without a rack or an order": list_text(writable, writable, now_ms=NOW_MS),
            "none": list_text([], LISTED, now_ms=NOW_MS),
        },
    )
