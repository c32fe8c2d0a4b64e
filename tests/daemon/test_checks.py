"""``bookmender check``: what it shows of the periodic checks, and how it requests one."""

import asyncio
from dataclasses import replace

import pytest

from auditor.checks.records import (
    ALL_LEDGERS,
    IDLE_OPEN,
    KINDS,
    CheckKind,
    CheckRecord,
    CheckRun,
    read_check,
)
from auditor.checks.runner import FORCED_MS
from daemon.cli.check import _exit_code
from daemon.operations.checks import (
    BOOKIES,
    Checks,
    RunRecord,
    force_check,
    pause_checks,
    read_checks,
    resume_checks,
    wait_checked,
)
from ledgers.errors import ConflictError, UnavailableError
from ledgers.store import Stat
from replication import znodes
from replication.orders import HoldOrder, OrderStore, hold_znode
from tests.auditor.auditing import auditing
from tests.auditor.checking import CountingCheck, checked_at_ms, checker, running, store_time
from tests.auditor.scenes import SOON_S
from tests.daemon.visits import Heard, visiting
from tests.replication.cluster import Cluster, in_virtual_time
from tests.replication.ledger_values import B1, B2
from tests.replication.nodes import PATHS

RUN = CheckRun(
    started_ms=1_000,
    cursor=51,
    ledger_count=50,
    ledgers_left=150,
    active_ms=10_000,
    counts={"found": 2, "marked": 1},
)


async def shown(cluster: Cluster) -> Checks:
    return await read_checks(visiting(cluster), clock=cluster.clock)


async def store_record(cluster: Cluster, record: CheckRecord, name: str = "all-ledgers") -> None:
    await cluster.store.create(PATHS.check(name), record.to_json(), with_parents=True)


@in_virtual_time
async def test_checks_that_never_ran_are_due_unless_switched_off() -> None:
    cluster = await Cluster.start()

    found = await shown(cluster)

    now_ms = cluster.clock.wall_ms()
    assert {row.name: row.due_ms for row in found.rows} == {
        "bookies": now_ms,
        "all-ledgers": now_ms,
        "replicas": None,
        "placement": now_ms,
        "idle-open": now_ms,
    }
    assert found.concerns == (
        "No auditor is running, so no check runs. Start one: bookmender daemon",
    )
    assert "replicas: never run; not scheduled" in found.to_text(now_ms=now_ms)


@in_virtual_time
async def test_a_run_under_way_is_shown_with_its_remainder() -> None:
    """The report has the ledgers left, the time left, and the result of the last run."""
    cluster = await Cluster.start()
    await asyncio.sleep(100)
    now_ms = cluster.clock.wall_ms()
    last = replace(RUN, started_ms=now_ms - 90_000, finished_ms=now_ms - 60_000)
    await store_time(cluster, now_ms - 60_000)
    await store_record(
        cluster, CheckRecord(running=replace(RUN, started_ms=now_ms - 50_000), last=last)
    )

    row = (await shown(cluster)).row("all-ledgers")

    assert row.to_text(now_ms=now_ms).split("\n") == [
        "all-ledgers: last run 1 min ago; running",
        "  50 ledgers checked, about 150 left, 30 s to go at 5 per second; 2 found, 1 marked",
        "  its last run checked 50 ledgers in 10 s: 2 found, 1 marked",
    ]
    assert RunRecord.of(RUN).remaining_s == 30


@in_virtual_time
async def test_the_time_written_by_javas_auditor_is_the_last_run() -> None:
    cluster = await Cluster.start()
    now_ms = cluster.clock.wall_ms()
    await store_time(cluster, now_ms - 3_600_000)

    row = (await shown(cluster)).row("all-ledgers")

    assert (row.last_ms, row.last) == (now_ms - 3_600_000, None)
    assert row.to_text(now_ms=now_ms) == "all-ledgers: last run 1 h ago; due in 6 d 23 h"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("has_run", [False, True])
@in_virtual_time
async def test_the_leader_runs_a_requested_check_at_once(kind: CheckKind, has_run: bool) -> None:
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2))
    check = CountingCheck(kind)
    if has_run:
        async with checker(cluster, check) as made, running(made):
            await force_check(visiting(cluster), check.kind.name)
            await asyncio.sleep(5)
        check.started_at.clear()

    async with checker(cluster, check) as made, running(made):
        await asyncio.sleep(5)
        check.started_at.clear()
        await force_check(visiting(cluster), check.kind.name)
        await asyncio.sleep(5)

    assert check.started_at == [0]
    assert await checked_at_ms(cluster, check.kind) != FORCED_MS


@in_virtual_time
async def test_a_request_does_not_overwrite_the_leaders_progress(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = await Cluster.start()
    name = IDLE_OPEN.name
    await store_record(cluster, CheckRecord(running=RUN), name)
    path, newer = PATHS.check(name), CheckRecord(last=replace(RUN, finished_ms=2_000))
    admin_session = visiting(cluster)
    get = admin_session.store.get

    async def get_and_change(read: str) -> tuple[bytes, Stat]:
        found = await get(read)
        if read == path:
            await cluster.store.set(path, newer.to_json(), version=found[1].version)
        return found

    monkeypatch.setattr(admin_session.store, "get", get_and_change)

    with pytest.raises(ConflictError):
        await force_check(admin_session, name)

    monkeypatch.undo()
    assert await read_check(cluster.store, PATHS, name) == newer


@pytest.mark.parametrize("name", [ALL_LEDGERS.name, IDLE_OPEN.name])
@in_virtual_time
async def test_a_request_without_a_leader_is_kept_and_shown(name: str) -> None:
    cluster = await Cluster.start()
    last = replace(RUN, finished_ms=2_000)
    await store_record(cluster, CheckRecord(last=last, last_ms=2_000), name)

    await force_check(visiting(cluster), name)
    await force_check(visiting(cluster), name)

    row = (await shown(cluster)).row(name)
    assert row.is_forced
    assert row.last_ms == 2_000, "a request is no run"
    assert "; requested" in row.to_text(now_ms=cluster.clock.wall_ms())
    assert (await read_check(cluster.store, PATHS, name)).last == last


@in_virtual_time
async def test_a_bookie_check_is_requested_like_javas_triggeraudit() -> None:
    """The request writes the recovery delay unchanged, which triggers an audit."""
    cluster = await Cluster.start()
    async with auditing(cluster):
        await asyncio.sleep(60)
        before = (await shown(cluster)).row(BOOKIES).last_ms
        data, stat = await cluster.store.get(PATHS.recovery_delay)

        await force_check(visiting(cluster), BOOKIES)
        await asyncio.sleep(SOON_S)

        after = (await shown(cluster)).row(BOOKIES).last_ms
    assert before is not None
    assert after is not None
    assert after > before
    again, changed = await cluster.store.get(PATHS.recovery_delay)
    assert (again, changed.version) == (data, stat.version + 1)


@in_virtual_time
async def test_a_bookie_check_is_refused_if_no_auditor_ever_led() -> None:
    cluster = await Cluster.start()

    with pytest.raises(UnavailableError, match="no auditor has ever run"):
        await force_check(visiting(cluster), BOOKIES)


@in_virtual_time
async def test_paused_checks_wait_until_they_are_resumed() -> None:
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2))
    check = CountingCheck()
    changes = [await pause_checks(visiting(cluster), clock=cluster.clock) for _ in range(2)]
    is_paused = (await shown(cluster)).is_paused

    async with checker(cluster, check) as made, running(made):
        await asyncio.sleep(60)
        before = check.looked_at.copy()
        changes += [await resume_checks(visiting(cluster)) for _ in range(2)]
        await asyncio.sleep(5)

    assert changes == [True, False, True, False]
    assert (is_paused, (await shown(cluster)).is_paused) == (True, False)
    assert (before, len(check.looked_at)) == ([], 1)


@in_virtual_time
async def test_the_reasons_why_checks_do_not_run_are_shown() -> None:
    cluster = await Cluster.start()
    await pause_checks(visiting(cluster), clock=cluster.clock)
    await cluster.store.create(PATHS.disable)
    hold = HoldOrder(since_ms=1, is_by_operator=True)
    await OrderStore(cluster.store, PATHS).give(hold_znode(PATHS), hold, over=None)

    concerns = (await shown(cluster)).concerns

    assert [concern.partition(": ")[2] for concern in concerns] == [
        "bookmender daemon",
        "bookmender check --resume",
        "bookmender enable",
        "bookmender hold",
    ]


@in_virtual_time
async def test_a_java_leader_is_a_concern() -> None:
    cluster = await Cluster.start()
    election = PATHS.election
    vote = znodes.vote_to_bytes("java:3181")
    await cluster.store.create(
        f"{election}/V_", vote, is_ephemeral=True, is_sequential=True, with_parents=True
    )

    found = await shown(cluster)

    assert found.leader == "java:3181"
    assert "Java's AutoRecovery (java:3181)" in found.concerns[0]


@in_virtual_time
async def test_waiting_for_a_check_shows_progress_and_returns_its_run() -> None:
    cluster = await Cluster.start()
    for ledger_id in range(10):
        await cluster.write_ledger((B1, B2), ledger_id=ledger_id)
    check, heard = CountingCheck(ALL_LEDGERS, part_size=1, part_s=3), Heard()
    async with checker(cluster, check) as made, running(made):
        await asyncio.sleep(60)
        before = (await shown(cluster)).row("all-ledgers").last
        assert before is not None
        await force_check(visiting(cluster), "all-ledgers")

        run = await wait_checked(
            visiting(cluster),
            "all-ledgers",
            after_ms=before.finished_ms,
            show=heard.show,
            clock=cluster.clock,
        )

    assert run.started_ms > before.started_ms
    assert heard.left == sorted(heard.left, reverse=True)
    assert len(set(heard.left)) > 2


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        pytest.param({}, 0, id="nothing"),
        pytest.param({"deleted": 3, "skipped": 2}, 0, id="only counts without meaning"),
        pytest.param({"found": 1, "unknown": 1}, 1, id="something is wrong"),
        pytest.param({"unknown": 1}, 3, id="one is unknown"),
        pytest.param({"strict": 2, "open_soft": 1}, 0, id="all are well placed"),
        pytest.param({"strict": 2, "open_fail": 1}, 1, id="one is misplaced"),
        pytest.param({"uncompared": 9}, 0, id="no source of racks: nothing to compare"),
        pytest.param({"open": 2}, 0, id="open ledgers, none of them idle"),
        pytest.param({"open": 2, "idle": 1}, 1, id="an idle one"),
        pytest.param({"unreadable": 1}, 3, id="one could not be opened"),
        pytest.param({"found": 0, "unknown": 0}, 0, id="only zero counts"),
    ],
)
def test_the_exit_code_depends_on_what_a_run_found(counts: dict[str, int], expected: int) -> None:
    assert _exit_code(replace(RUN, counts=counts)) == expected
