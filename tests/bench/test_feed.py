"""The figures of the change feed: the report, and small measurements that need no cluster."""

import asyncio
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from bench.etcd import PREFIX, EtcdClient, find_etcd
from bench.etcd_pb2 import (
    Event,
    KeyValue,
    RangeRequest,
    RangeResponse,
    ResponseHeader,
    WatchRequest,
    WatchResponse,
)
from bench.feed import LogFigures
from bench.feed_catch_up import CatchUpFigures
from bench.feed_goals import GOALS, Measured, report
from bench.feed_receipts import measure_behind, measure_stored
from bench.feed_table import PARTS, Figures, in_own_process, sustained_per_s
from bench.feed_takeover import TakeoverFigures
from ledgers.errors import SettingsError, UnavailableError


def measured(part: str, *, others_share: float = 0.0, **values: float) -> Measured:
    return Measured(part=part, values=values, text=f"text of {part}", others_share=others_share)


def rows(text: str) -> dict[str, list[str]]:
    """Return the cells of the goals, by title."""
    section = text.split("## Goals")[1].split("\n## ")[0]
    cells = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:2] == "| "]
    return {row[0]: row[1:] for row in cells}


@pytest.mark.parametrize(
    ("takeover_s", "shown", "must", "aim"),
    [
        pytest.param(2.9, "2.9 s", "met", "met", id="better than the aim"),
        pytest.param(3.04, "3.0 s", "met", "met", id="the aim, as it is shown"),
        pytest.param(10.0, "10.0 s", "met", "MISSED", id="just what must be"),
        pytest.param(10.1, "10.1 s", "MISSED", "MISSED", id="too slow"),
    ],
)
def test_a_figure_is_compared_with_its_limits(
    takeover_s: float, shown: str, must: str, aim: str
) -> None:
    row = rows(report([measured("take-over", takeover_s=takeover_s)]))[
        "take-over at 1,000,000 ledgers, 10,000 changes, beyond the scan"
    ]

    assert row == [shown, "≤ 10 s", "≤ 3 s", must, aim, "0%"]


def test_a_ratio_must_be_at_least_its_limit() -> None:
    row = rows(report([measured("catch-up", times_the_watch=0.7)]))[
        "catch-up of 100,000 changes, times the rate of etcd's watch"
    ]

    assert row[:5] == ["0.7", "≥ 0.5", "≥ 1", "met", "MISSED"]


def test_what_was_not_measured_keeps_its_row_and_says_why() -> None:
    text = report([], failures={"catch-up": "etcd is needed"})

    assert {row[0] for title, row in rows(text).items() if title not in ("figure", "---")} == {
        "not measured"
    }
    assert "- catch-up: etcd is needed" in text


def test_the_report_says_that_the_machine_was_busy() -> None:
    busy = report([measured("behind", others_share=0.4, known_s=1.0, memory_mb=50)])
    quiet = report([measured("behind", others_share=0.05, known_s=1.0, memory_mb=50)])

    assert "others used 40% of the cores" in busy
    assert "The machine was busy" not in quiet


def test_every_goal_has_a_part_that_measures_it() -> None:
    assert {goal.part for goal in GOALS} == set(PARTS)


def test_a_sustained_rate_includes_the_wait_for_the_last_change() -> None:
    figures = LogFigures(
        wanted_per_s=0,
        written_per_s=1_000,
        published_per_s=0,
        change_count=9_000,
        span_count=9_000,
        lag_s=1.0,
        node_us=0,
        zookeeper_us=0,
        bookies_us=0,
        bench_us=0,
        others_cores=0,
        median_ms=0,
        p99_ms=0,
    )

    assert sustained_per_s(figures) == 900


def test_the_slower_take_over_counts() -> None:
    figures = TakeoverFigures(
        ledger_count=1, change_count=1, scan_s=9, first_s=9, from_log_s=2, from_base_s=3
    )

    assert figures.slower_s == 3


def test_rates_are_compared_by_their_medians() -> None:
    figures = CatchUpFigures(
        change_count=1,
        checkpoint_count=1,
        feed_s=(1, 2, 30),
        watch_s=(1, 6, 9),
        list_s=(1, 1, 1),
    )

    assert figures.times_the_watch == 3
    assert figures.times_the_list == 0.5


def test_a_client_that_is_behind_knows_all_changes() -> None:
    figures = asyncio.run(measure_behind(2_000, changes_each=100))

    assert figures.change_count == 2_000


def test_stored_receipts_take_the_same_size_whatever_their_number() -> None:
    few, many = (
        asyncio.run(measure_stored(count, window=100, stored_at_once=500)) for count in (600, 3_000)
    )

    assert few.row_count_max > 1
    assert few.file_bytes == many.file_bytes < 10_000


def test_without_etcd_the_bench_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="apt-get install etcd-server"):
        find_etcd(tmp_path / "etcd")


# --- The client of etcd ---------------------------------------------------------------------------


@contextmanager
def served(events: list[Event]) -> Iterator[str]:
    """Serve a watch that sends these events, one in each reply, and the list of their keys."""

    def watch(requests: Iterator[WatchRequest], context: object) -> Iterator[WatchResponse]:
        first = next(requests).create_request.start_revision
        yield WatchResponse(created=True)
        for event in events:
            if event.kv.mod_revision >= first:
                yield WatchResponse(events=[event])
        for _ in requests:  # a watch does not end by itself
            pass

    def list_keys(request: RangeRequest, context: object) -> RangeResponse:
        pairs = [each.kv for each in events if each.kv.mod_revision >= request.min_mod_revision]
        return RangeResponse(header=ResponseHeader(revision=9), kvs=pairs)

    watching = grpc.stream_stream_rpc_method_handler(
        watch, WatchRequest.FromString, WatchResponse.SerializeToString
    )
    listing = grpc.unary_unary_rpc_method_handler(
        list_keys, RangeRequest.FromString, RangeResponse.SerializeToString
    )
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers(
        [
            grpc.method_handlers_generic_handler("etcdserverpb.Watch", {"Watch": watching}),
            grpc.method_handlers_generic_handler("etcdserverpb.KV", {"Range": listing}),
        ]
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def event(revision: int, *, is_deletion: bool = False) -> Event:
    pair = KeyValue(key=PREFIX + b"%d" % revision, mod_revision=revision)
    return Event(type=Event.DELETE if is_deletion else Event.PUT, kv=pair)


def test_the_client_of_etcd_reports_the_changes_of_its_revisions() -> None:
    found: list[tuple[bytes, int, bool]] = []
    with served([event(1), event(2), event(3, is_deletion=True), event(4)]) as address:
        client = EtcdClient(address)

        client.watch(2, 3, lambda *change: found.append(change))
        client.close()

    assert found == [(PREFIX + b"2", 2, False), (PREFIX + b"3", 3, True)]


def test_the_client_of_etcd_lists_keys_changed_since_a_revision() -> None:
    found: list[int] = []
    with served([event(1), event(2), event(3)]) as address:
        client = EtcdClient(address)

        client.list_changed(2, lambda key, revision, is_deleted: found.append(revision))
        assert client.revision() == 9
        client.close()

    assert found == [2, 3]


# --- Processes of the parts -----------------------------------------------------------------------


def fail() -> Figures:
    raise SettingsError("etcd is needed")


def die() -> Figures:
    os._exit(1)


def succeed() -> Figures:
    return {"takeover_s": 1.0}, "text"


def test_a_part_returns_its_figures_from_its_own_process() -> None:
    assert in_own_process(succeed) == ({"takeover_s": 1.0}, "text")


def test_a_part_that_fails_or_dies_does_not_end_the_bench() -> None:
    with pytest.raises(SettingsError, match="etcd is needed"):
        in_own_process(fail)
    with pytest.raises(UnavailableError, match="ended early"):
        in_own_process(die)
