"""Ids and registrations of bookies as Java writes them."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledgers.codec.bookkeeper_metadata_pb2 import BookieServiceInfoFormat
from ledgers.codec.registration import Address, parse_address, parse_bookie_id, registered_address
from ledgers.errors import CorruptionError
from tests.vectors import Case, cases

REGISTRATIONS = [case for case in cases("znode_payloads") if case["kind"] == "available"]


def _bookie(case: Case) -> str:
    bookie: str = case["path"].rpartition("/")[2]
    return bookie


@pytest.mark.parametrize("text", ["192.0.2.1:3181", "bookie-1:3181", "[2001:db8::1]:3181"])
def test_an_address_is_shown_as_in_a_bookie_id(text: str) -> None:
    assert str(parse_address(text)) == text


# --- ids ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "is_valid"),
    [
        pytest.param("192.0.2.1:3181", True, id="an address"),
        pytest.param("a_B-C.9:;<=>?@[]^", True, id="every allowed sign"),
        pytest.param("bookie\\one", True, id="a backslash"),
        pytest.param("x" * 1000, True, id="long"),
        pytest.param("readonly-1", True, id="begins like the read-only directory"),
        pytest.param("readonly", False, id="the read-only directory"),
        pytest.param("ReadOnly", False, id="the read-only directory in any case"),
        pytest.param("", False, id="empty"),
        pytest.param("a/b", False, id="a slash would make it a path"),
        pytest.param("a b", False, id="a blank"),
        pytest.param("a\n", False, id="a line feed behind"),
        pytest.param("bücher", False, id="not ASCII"),
        pytest.param("a`b", False, id="just beyond the allowed signs"),
    ],
)
def test_an_id_is_what_java_allows(text: str, is_valid: bool) -> None:
    if is_valid:
        assert parse_bookie_id(text) == text
    else:
        with pytest.raises(CorruptionError, match="not a bookie id"):
            parse_bookie_id(text)


@pytest.mark.parametrize(
    ("bookie_id", "address"),
    [
        pytest.param("192.0.2.1:3181", Address("192.0.2.1", 3181), id="IPv4"),
        pytest.param("bookie.example:1", Address("bookie.example", 1), id="a name"),
        pytest.param("[2001:db8::1]:3181", Address("2001:db8::1", 3181), id="IPv6"),
        pytest.param("bookie-four.example", None, id="an opaque name"),
        pytest.param("bookie:", None, id="no port"),
        pytest.param(":3181", None, id="no host"),
        pytest.param("bookie:0", None, id="a placeholder of placement"),
        pytest.param("bookie:65536", None, id="port too large"),
        pytest.param("bookie:٣", None, id="a digit of another script"),
        pytest.param("", None, id="empty"),
    ],
)
def test_an_id_may_contain_the_address(bookie_id: str, address: Address | None) -> None:
    assert parse_address(bookie_id) == address


# --- registrations --------------------------------------------------------------------------------


@pytest.mark.parametrize("case", REGISTRATIONS, ids=lambda case: case["path"])
def test_a_registration_is_read_as_java_wrote_it(case: Case) -> None:
    (rpc,) = [e for e in case["fields"]["endpoints"] if e["protocol"] == "bookie-rpc"]

    address = registered_address(_bookie(case), bytes.fromhex(case["data"]))

    assert address == Address(rpc["host"], rpc["port"])


@pytest.mark.parametrize(
    ("bookie_id", "address"), [("192.0.2.1:3181", Address("192.0.2.1", 3181)), ("opaque", None)]
)
def test_an_old_bookie_registers_only_its_id(bookie_id: str, address: Address | None) -> None:
    assert registered_address(bookie_id, b"") == address


def _registration(*, host: str = "h", port: int = 1, protocol: str = "bookie-rpc") -> bytes:
    info = BookieServiceInfoFormat()
    info.endpoints.add(id="bookie", host=host, port=port, protocol=protocol)
    return info.SerializeToString()


def test_a_bookie_without_a_protocol_port_has_no_address() -> None:
    address = registered_address("192.0.2.1:3181", _registration(protocol="http"))

    assert address is None


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(_registration(host=""), id="no host"),
        pytest.param(_registration(port=0), id="port 0"),
        pytest.param(_registration(port=-1), id="a negative port"),
        pytest.param(_registration(port=65_536), id="port too large"),
        pytest.param(_registration(host="xyz").replace(b"xyz", b"\xff\xfe\xfd"), id="not UTF-8"),
        pytest.param(_registration()[:-1], id="cut short"),
        pytest.param(b"2\x02\n\x00", id="an endpoint without host and port"),
    ],
)
def test_an_impossible_registration_is_corruption(data: bytes) -> None:
    with pytest.raises(CorruptionError):
        registered_address("192.0.2.1:3181", data)


@given(st.binary(max_size=60), st.text(max_size=20))
def test_any_registration_is_read_or_refused(data: bytes, bookie_id: str) -> None:
    with suppress(CorruptionError):
        registered_address(bookie_id, data)


@pytest.mark.parametrize("case", REGISTRATIONS[:1], ids=lambda case: case["path"])
@given(data=st.data())
def test_a_damaged_registration_is_read_or_refused(case: Case, data: st.DataObject) -> None:
    damaged = bytearray.fromhex(case["data"])
    damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))

    with suppress(CorruptionError):
        registered_address("b:1", bytes(damaged))
