"""Host names that hang or fail, beside others that resolve, with real threads because lookups block
them."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Sequence

import pytest

from ledgers import host_names
from ledgers.codec.registration import Address
from ledgers.errors import NameNotResolvedError
from ledgers.host_names import HostNames, connect
from tests.ledgers.scripted_bookie import in_loop, scripted_bookie

DEAD = [f"dead-{i}" for i in range(8)]
HEALTHY = [f"healthy-{i}" for i in range(6)]


class Dns:
    """Resolves healthy names at once. Dead ones hang until the test ends."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.known = dict.fromkeys(HEALTHY, "127.0.0.1")
        self.end = threading.Event()

    def __call__(self, host: str) -> Sequence[str]:
        self.asked[host] += 1
        if host in DEAD:
            self.end.wait()
        if host not in self.known:
            raise OSError("no such name")
        return [self.known[host]]


@pytest.fixture
def dns() -> Dns:
    return Dns()


@in_loop
async def test_unresolvable_names_delay_no_other(dns: Dns, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_names, "LOOKUP_WAIT_S", 0.2)

    hosts = HostNames(dns)
    dead = [asyncio.create_task(hosts.addresses(host)) for host in DEAD]
    await asyncio.sleep(0)

    found = await asyncio.gather(*map(hosts.addresses, HEALTHY))

    assert found == [["127.0.0.1"]] * len(HEALTHY)
    failed = await asyncio.gather(*dead, return_exceptions=True)
    assert all(isinstance(each, NameNotResolvedError) for each in failed)
    dns.end.set()


@in_loop
async def test_callers_share_one_lookup_of_a_name(dns: Dns) -> None:
    hosts = HostNames(dns)

    await asyncio.gather(*(hosts.addresses(HEALTHY[0]) for _ in range(20)))
    await hosts.addresses(HEALTHY[0])

    assert dns.asked == {HEALTHY[0]: 1}


@in_loop
async def test_a_name_that_failed_is_not_looked_up_again_at_once(dns: Dns) -> None:
    hosts = HostNames(dns)
    for _ in range(3):
        with pytest.raises(NameNotResolvedError):
            await hosts.addresses("unknown")

    assert dns.asked == {"unknown": 1}


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_numeric_address_is_never_looked_up(dns: Dns, host: str) -> None:
    assert asyncio.run(HostNames(dns).addresses(host)) == [host]
    assert not dns.asked


@in_loop
async def test_a_known_address_is_used_during_the_next_lookup(
    dns: Dns, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_names, "REFRESH_S", 0.0)

    hosts = HostNames(dns)
    await hosts.addresses(HEALTHY[0])
    dns.known[HEALTHY[0]] = "127.0.0.2"

    assert await hosts.addresses(HEALTHY[0]) == ["127.0.0.1"]
    deadline_s = time.monotonic() + 10
    while await hosts.addresses(HEALTHY[0]) != ["127.0.0.2"]:
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.01)


@in_loop
async def test_a_known_address_is_kept_if_the_name_fails_later(
    dns: Dns, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_names, "REFRESH_S", 0.0)

    hosts = HostNames(dns)
    await hosts.addresses(HEALTHY[0])
    del dns.known[HEALTHY[0]]

    for _ in range(5):
        assert await hosts.addresses(HEALTHY[0]) == ["127.0.0.1"]
        await asyncio.sleep(0.01)


@in_loop
async def test_a_failed_connection_causes_a_new_lookup(dns: Dns) -> None:
    hosts = HostNames(dns)
    with pytest.raises(ConnectionRefusedError):
        await connect(asyncio.Protocol, Address(HEALTHY[0], 1), names=hosts)
    await asyncio.sleep(0.05)

    assert dns.asked[HEALTHY[0]] == 2


@in_loop
async def test_a_bookie_is_connected_to_by_its_name(dns: Dns) -> None:
    async with scripted_bookie(lambda *_: None) as bookie:  # type: ignore[arg-type]
        transport, _ = await connect(
            asyncio.Protocol, Address(HEALTHY[0], bookie.address.port), names=HostNames(dns)
        )
        transport.close()
