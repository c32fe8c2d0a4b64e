"""The names of a bookie, and its rack now and before."""

import pytest

from ledgers.codec.registration import Address
from ledgers.errors import CorruptionError
from ledgers.model import BookieId
from ledgers.placement import DEFAULT_RACK
from ledgers.placement.pulsar import parse_pulsar_racks
from ledgers.placement.topology import Racks, clean_rack, find_rack, names_of

A, B = BookieId("bookie-a:3181"), BookieId("bookie-b:3181")


@pytest.mark.parametrize(
    ("text", "rack"),
    [
        ("/rack-1", "/rack-1"),
        ("rack-1", "/rack-1"),
        (" /region/rack/ ", "/region/rack"),
        ("", None),
        ("/", None),
        ("  ", None),
    ],
)
def test_a_rack_is_written_as_a_path(text: str, rack: str | None) -> None:
    assert clean_rack(text) == rack


@pytest.mark.parametrize(
    ("bookie", "address", "ip", "names"),
    [
        pytest.param(
            "opaque",
            Address(host="host-1", port=3181),
            "10.0.0.1",
            ["opaque", "host-1:3181", "host-1", "10.0.0.1"],
            id="an opaque id",
        ),
        pytest.param(
            "host-1:3181", None, None, ["host-1:3181", "host-1"], id="an id with a valid form"
        ),
        pytest.param(
            "host-1:3181",
            Address(host="10.0.0.1", port=3182),
            None,
            ["host-1:3181", "10.0.0.1:3182", "10.0.0.1"],
            id="its registered name counts",
        ),
        pytest.param("opaque", None, None, ["opaque"], id="nothing is known of it"),
    ],
)
def test_a_bookie_has_names(
    bookie: str, address: Address | None, ip: str | None, names: list[str]
) -> None:
    assert list(names_of(BookieId(bookie), address, ip)) == names


def test_the_most_exact_name_decides() -> None:
    table = {"host-1": "/of-the-host", "host-1:3181": "/of-the-bookie"}

    assert find_rack(names_of(BookieId("host-1:3181"), None), table) == "/of-the-bookie"
    assert find_rack(names_of(BookieId("host-1:3182"), None), table) == "/of-the-host"
    assert find_rack(names_of(BookieId("host-2:3181"), None), table) is None


def test_an_absent_bookie_keeps_its_rack() -> None:
    racks = Racks()
    racks.learn({A: "/a", B: "/b"}, present={A, B})

    assert racks.learn({A: "/c"}, present={A})

    assert (racks.rack(A), racks.rack(B)) == ("/c", "/b")


def test_a_registered_bookie_without_rack_is_in_the_default_one() -> None:
    racks = Racks()
    racks.learn({A: "/a"}, present={A})

    assert racks.learn({}, present={A})

    assert racks.rack(A) == DEFAULT_RACK


def test_known_racks_are_no_change() -> None:
    racks = Racks()
    racks.learn({A: "/a", B: "/b"}, present={A, B})

    assert not racks.learn({A: "/a"}, present={A})


def test_pulsars_racks_are_read_in_every_group() -> None:
    data = b"""{
        "default": {
            "bookie-a:3181": {"rack": "rack-1", "hostname": "host-a"},
            "bookie-b:3181": {"rack": "/region/rack-2", "hostname": ""},
            "bookie-c:3181": {"rack": "/", "hostname": "host-c"},
            "bookie-d:3181": {"rack": null}
        },
        "isolated": {"bookie-e:3181": {"rack": "/r", "hostname": null, "later": [1]}}
    }"""

    assert parse_pulsar_racks(data) == {
        "bookie-a:3181": "/rack-1",
        "host-a": "/rack-1",
        "bookie-b:3181": "/region/rack-2",
        "bookie-e:3181": "/r",
    }


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b'{"group": 1}',
        b'{"g": {"b": "rack"}}',
        b"\xff",
        b'{"g": {"b": {"rack":' + b"[" * 60_000,
    ],
)
def test_invalid_maps_of_racks_are_refused(data: bytes) -> None:
    with pytest.raises(CorruptionError, match="not a map of groups"):
        parse_pulsar_racks(data)
