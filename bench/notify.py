"""How many clients a server of notifications tells of how many changes, how soon, and at what cost:
``python -m bench.notify``.

"fan-out" and "storm" have no cluster: servers read changes from memory (``notify_load``), and at
the end each client must have the latest version of each object. The others run ZooKeeper, bookies,
a node of ours and ``bookmender notify serve``. Every record is written at once. Parts that are not
selected (``--only``) keep their earlier results.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import click

from bench.notify_cluster import (
    CHANGES,
    PUBLISH,
    REPAIR,
    measure_changes,
    measure_publish,
    measure_repair,
)
from bench.notify_load import (
    ChangeLog,
    ClientFigures,
    ClientProcess,
    ServerProcess,
    client_process,
    server_process,
)
from bench.records import Record, Records
from bench.report import CORES, Goal, Summary, failures_section, goals_section, named
from bench.session import Session, bench_session, chosen, quick_option, results_option

FAN_OUT, STORM, ETCD = "fan-out", "storm", "etcd"
PARTS = (FAN_OUT, STORM, CHANGES, PUBLISH, REPAIR)
CLIENTS, QUICK_CLIENTS, OBJECTS_EACH = 10_000, 500, 10
"""Each object has ten holders in the mean: there are as many objects as clients."""
STEADY_PER_S, KNOWN_LEDGERS = 13_000, 1_000_000
FAST_PER_S = (26_000, 40_000, 60_000)
"""Notifications a second that are caused. Those that are told count."""
DURATION_S, QUICK_DURATION_S, IDLE_S, SETTLE_S = 10.0, 3.0, 30.0, 3.0
CONNECTED_S, CURRENT_S = 180.0, 120.0
STORM_CHANGES_PER_S, STORM_MAX_S, UNTOUCHED = 300, 120.0, 500
STORM_STARTS_PER_S = 500.0
"""Slowly enough that no client is turned away by the first server."""


@click.command()
@click.option("--only", default=",".join(PARTS), show_default=True)
@quick_option
@results_option
def main(only: str, quick: bool, results: Path | None) -> None:
    """Measure notifications."""
    parts = {
        FAN_OUT: (FAN_OUT, measure_fan_out),
        STORM: (STORM, measure_storm),
        CHANGES: (CHANGES, measure_changes),
        PUBLISH: (PUBLISH, measure_publish),
        REPAIR: (REPAIR, measure_repair),
    }
    with bench_session("notify", report, results=results, is_kept=not quick) as session:
        for name, part in chosen(parts, only):
            with session.attempt(name):
                found = asyncio.run(part(session, quick))
                load = f"load average of the machine afterwards: {os.getloadavg()[0]:.1f}"
                session.add(Record(name=name, values=found.values, text=f"{found.text}\n{load}"))


# --- Without a cluster ----------------------------------------------------------------------------


async def measure_fan_out(session: Session, is_quick: bool) -> Record:
    """Connect all clients to one server, leave them idle, and then change their objects."""
    clients = QUICK_CLIENTS if is_quick else CLIENTS
    duration_s, scale = (QUICK_DURATION_S, 10) if is_quick else (DURATION_S, 1)
    log = ChangeLog(clients)
    with server_process(log, known=1) as small, server_process(log, known=KNOWN_LEDGERS) as server:
        await small.wait_ready()
        await server.wait_ready()
        values = {"ledgers_mb": (server.rss_bytes - small.rss_bytes) / 1e6}
    with server_process(log, known=clients) as server:
        await server.wait_ready()
        rss, began_s = server.rss_bytes, time.monotonic()
        with client_process(log, [server.url], clients=clients, keys_each=OBJECTS_EACH) as swarm:
            live_s = (await swarm.wait_current(timeout_s=CONNECTED_S)).live_s
            values["connect_us"] = 1e6 * server.cpu_s / clients
            await asyncio.sleep(SETTLE_S)
            values["client_kb"] = (server.rss_bytes - rss) / clients / 1e3
            used_s, idle_s = server.cpu_s, duration_s if is_quick else IDLE_S
            await asyncio.sleep(idle_s)
            values["idle_percent"] = 100 * (server.cpu_s - used_s) / idle_s
            texts = [
                f"{clients:,} clients connected in {live_s - began_s:.1f} s, "
                f"{values['connect_us']:.0f} us of the server's CPU for each"
            ]
            figures = []
            for per_s in (STEADY_PER_S, *FAST_PER_S):
                found, text = await measure_rate(server, swarm, log, per_s // scale, duration_s)
                session.say(text)
                figures.append(found)
                texts.append(text)
    values |= figures[0] | {"told_per_s": max(each["told_per_s"] for each in figures)}
    return Record(name=FAN_OUT, values=values, text="\n".join(texts))


async def measure_rate(
    server: ServerProcess, swarm: ClientProcess, log: ChangeLog, per_s: int, duration_s: float
) -> tuple[dict[str, float], str]:
    """Cause so many notifications a second. Rate and CPU count until the last one was told."""
    await swarm.begin()
    began_s, server_s, clients_s = time.monotonic(), server.cpu_s, swarm.cpu_s
    await log.write(per_s // OBJECTS_EACH, duration_s)
    found = await swarm.wait_current(timeout_s=CURRENT_S)
    took_s, told = found.last_s - began_s, found.told_count
    values = {
        "told_per_s": told / took_s,
        "median_ms": 1e3 * found.median_s,
        "p99_ms": 1e3 * found.p99_s,
        "server_us": 1e6 * (server.cpu_s - server_s) / told,
        "clients_us": 1e6 * (swarm.cpu_s - clients_s) / told,
    }
    return values, (
        f"{per_s:,} notifications/s caused: told {values['told_per_s']:,.0f}/s, the last "
        f"{took_s - duration_s:.2f} s after the end; CPU a notification: server "
        f"{values['server_us']:.1f} us, clients {values['clients_us']:.1f} us; change to client: "
        f"median {values['median_ms']:.0f} ms, p99 {values['p99_ms']:.0f} ms"
    )


async def measure_storm(session: Session, is_quick: bool) -> Record:
    """Kill a server, whose clients all go to another one while objects change."""
    clients = QUICK_CLIENTS if is_quick else CLIENTS
    log = ChangeLog(clients)
    with ExitStack() as stack:
        first, other = (stack.enter_context(server_process(log, known=clients)) for _ in range(2))
        await asyncio.gather(first.wait_ready(), other.wait_ready())
        untouched = stack.enter_context(client_process(log, [other.url], clients=UNTOUCHED, seed=2))
        urls = [first.url, other.url]
        storming = stack.enter_context(
            client_process(log, urls, clients=clients, seed=3, starts_per_s=STORM_STARTS_PER_S)
        )
        await untouched.wait_current(timeout_s=CONNECTED_S)
        await storming.wait_current(timeout_s=CONNECTED_S)
        changing = asyncio.create_task(log.write(STORM_CHANGES_PER_S, STORM_MAX_S))
        quiet = await _told_within(untouched, SETTLE_S)
        await untouched.begin()
        killed_s, used_s = time.monotonic(), other.cpu_s
        first.process.kill()
        live_s = 0.0
        while live_s < killed_s or live_s == float("inf"):
            await asyncio.sleep(0.5)
            live_s = (await storming.figures()).live_s
        cpu_us = 1e6 * (other.cpu_s - used_s) / clients
        meanwhile = await untouched.figures()
        changing.cancel()
        await asyncio.gather(changing, return_exceptions=True)
        for each in (untouched, storming):
            await each.wait_current(timeout_s=CURRENT_S)
    return Record(
        name=STORM,
        values={"current_s": live_s - killed_s, "untouched_p99_ms": 1e3 * meanwhile.p99_s},
        text=f"{clients:,} clients lost their server: all current at the other one after "
        f"{live_s - killed_s:.1f} s, {cpu_us:.0f} us of its CPU for each; none lacks a version\n"
        f"{UNTOUCHED} others, change to client: median {1e3 * meanwhile.median_s:.0f} ms, p99 "
        f"{1e3 * meanwhile.p99_s:.0f} ms meanwhile; {1e3 * quiet.median_s:.0f} and "
        f"{1e3 * quiet.p99_s:.0f} ms before",
    )


async def _told_within(clients: ClientProcess, duration_s: float) -> ClientFigures:
    await clients.begin()
    await asyncio.sleep(duration_s)
    return await clients.figures()


# --- The report -----------------------------------------------------------------------------------

PREAMBLE = """\
# Notifications

Everything runs on one machine with {cores} cores: servers and clients, and for the last parts
ZooKeeper, bookies and a node. ZooKeeper does not wait for the disk. The figures depend on the
machine. `bench/README.md` says what each figure means.

Recorded, measured once: {etcd}.
"""


def _measured(part: str, name: str) -> Callable[[Records], Summary]:
    return lambda records: named(name, "").summary(records.find(part))


MEMORY, KNOWN = "memory a client with 10 objects", "memory of 1,000,000 known ledgers"
IDLE = "10,000 idle clients, CPU of the server"
LOST = "10,000 clients lose their server, until all are current"
BESIDE = "repair beside a storm of clients, over a repair beside none: "
GOALS = [
    Goal(title, _measured(part, name), must, aim, at_least=aim > must, unit=unit, digits=digits)
    for part, name, must, aim, unit, digits, title in (
        (FAN_OUT, "told_per_s", 13_000, 40_000, "", 0, "notifications/s to 10,000 clients"),
        (FAN_OUT, "median_ms", 20, 5, " ms", 0, "change to client at 13,000/s, median"),
        (FAN_OUT, "p99_ms", 100, 30, " ms", 0, "change to client at 13,000/s, p99"),
        (FAN_OUT, "client_kb", 25, 18, " KB", 1, MEMORY),
        (FAN_OUT, "ledgers_mb", 40, 20, " MB", 1, KNOWN),
        (FAN_OUT, "idle_percent", 5, 2, " % of a core", 1, IDLE),
        (STORM, "current_s", 30, 10, " s", 1, LOST),
        (STORM, "untouched_p99_ms", 500, 200, " ms", 0, "latency of others meanwhile, p99"),
        (CHANGES, "median_ms", 150, 80, " ms", 0, "ZooKeeper to client, 1,000/s, median"),
        (CHANGES, "p99_ms", 400, 200, " ms", 0, "ZooKeeper to client, 1,000/s, p99"),
        (CHANGES, "rare_median_ms", 60, 30, " ms", 0, "a rare change, median"),
        (CHANGES, "rare_most_ms", 150, 80, " ms", 0, "a rare change, the slowest"),
        (PUBLISH, "publications_per_s", 1_000, 3_000, "", 0, "publications/s"),
        (REPAIR, "whole_s", 1.0, 1.0, " x", 2, f"{BESIDE}time"),
        (REPAIR, "packets", 1.0, 1.0, " x", 2, f"{BESIDE}requests to ZooKeeper"),
        (REPAIR, "copied_bytes", 1.0, 1.0, " x", 2, f"{BESIDE}bytes copied"),
        (ETCD, "times_etcd", 0.5, 1, " x", 2, "notifications/s, times etcd's"),
    )
]


def report(records: Records) -> str:
    sections = [
        PREAMBLE.format(cores=CORES, etcd=ETCD),
        *failures_section(records),
        goals_section(GOALS, records),
    ]
    for part in (*PARTS, ETCD):
        sections += [f"## {part}\n\n{record.text}\n" for record in records.find(part)]
    return "\n".join(sections)


if __name__ == "__main__":
    main()
