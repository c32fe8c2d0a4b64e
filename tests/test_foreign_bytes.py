"""Whatever bytes come from outside, each decoder returns a value or raises its documented error, in
linear time.

Outside are bookies, ZooKeeper with everything that others write there, scripts and files. A new
decoder gets a row in ``DECODERS``.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoints.codec import CheckpointDecoder, decode_page, encode_checkpoint, encode_page
from checkpoints.model import Checkpoint
from checkpoints.stores.zookeeper import decode_client
from daemon.java_settings import read_properties
from daemon.placement import parse_rack_file
from ledgers.codec.bookkeeper_metadata_pb2 import BookieServiceInfoFormat
from ledgers.codec.layout import Layout, parse_layout, serialize_layout
from ledgers.codec.metadata import (
    may_name,
    named_bookies,
    parse_metadata,
    parse_outline,
    serialize_metadata,
)
from ledgers.codec.registration import parse_address, parse_bookie_id, registered_address
from ledgers.digest import EntryHeader
from ledgers.errors import (
    CorruptionError,
    DigestMismatchError,
    SettingsError,
    UnauthorizedError,
)
from ledgers.model import BookieId, LedgerMetadata, Segment
from ledgers.placement.pulsar import (
    CONFIG_KEY,
    isolation_of,
    parse_pulsar_groups,
    parse_pulsar_racks,
)
from ledgers.secret import Secret
from ledgers.wire import v2, v3
from ledgers.wire.framing import FrameReader, frame
from ledgers.wire.sasl import Credentials, DigestMd5
from ledgers.zookeeper.servers import parse_server
from replication import znodes
from replication.ledger_record import WaitingNote
from replication.racks import StoredRacks
from replication.znodes import Mark

METADATA = LedgerMetadata(
    ensemble_size=2,
    write_quorum=2,
    ack_quorum=1,
    password=b"p\n\\",
    custom=(("key", b'"'),),
    segments=(Segment(first_entry_id=0, ensemble=(BookieId("a:1"), BookieId("b:1"))),),
)
VERSION_1 = b"BookieMetadataFormatVersion\t1\n1\n2\n0\n0\ta:1\tb:1\n9\tCLOSED"
NOTE = (
    b'{"version":1,"ledger_id":7,"blocked":{"reason":"no-copy","facts":{}},"node":"a","since_ms":1}'
)
RACKS = b'{"group": {"a:1": {"rack": "/r", "hostname": "a"}}}'


def service_info() -> bytes:
    info = BookieServiceInfoFormat()
    info.endpoints.add(id="bookie", protocol="bookie-rpc", host="a", port=3181)
    return info.SerializeToString()


def drained(data: bytes) -> None:
    reader = FrameReader(frame_bytes_max=1_000)
    reader.feed(data)
    while reader.next_packet() is not None:
        pass


def isolation(data: bytes) -> None:
    isolation_of(replace(METADATA, custom=((CONFIG_KEY, data),)))


def answer_challenge(data: bytes) -> None:
    DigestMd5(Credentials(user="u", password=Secret("p")), service="s", server="s").answer(data)


def java_file(data: bytes) -> None:
    with NamedTemporaryFile() as file:
        Path(file.name).write_bytes(data)
        read_properties(Path(file.name))


@dataclass(frozen=True)
class Decoder:
    """``errors``: the documented ones. ``valid``: bytes that are accepted."""

    decode: Callable[[bytes], Any]
    valid: bytes
    errors: tuple[type[Exception], ...] = (CorruptionError,)

    def accepts_or_refuses(self, data: bytes) -> None:
        with suppress(*self.errors):
            self.decode(data)

    def cost_s(self, data: bytes) -> float:
        """Return the least processor time of three tries."""
        times_s = []
        for _ in range(3):
            start_s = time.process_time()
            self.accepts_or_refuses(data)
            times_s.append(time.process_time() - start_s)
        return min(times_s)


DECODERS = {
    "metadata 1": Decoder(parse_metadata, VERSION_1),
    "metadata 2": Decoder(
        parse_metadata, serialize_metadata(replace(METADATA, metadata_version=2))
    ),
    "metadata 3": Decoder(parse_metadata, serialize_metadata(METADATA)),
    "outline": Decoder(parse_outline, serialize_metadata(METADATA)),
    "named bookies": Decoder(named_bookies, serialize_metadata(METADATA), ()),
    "may name": Decoder(lambda data: may_name(data, BookieId("a:1")), VERSION_1, ()),
    "bookie id": Decoder(lambda data: parse_bookie_id(data.decode("latin-1")), b"a:1"),
    "address": Decoder(lambda data: parse_address(data.decode("latin-1")), b"[::1]:1", ()),
    "service info": Decoder(lambda data: registered_address("a:1", data), service_info()),
    "LAYOUT": Decoder(
        parse_layout, serialize_layout(Layout.HIERARCHICAL), (CorruptionError, SettingsError)
    ),
    "mark": Decoder(
        znodes.parse_mark, znodes.mark_to_bytes(Mark(replicas=(BookieId("a:1"),), ctime_ms=1))
    ),
    "lock": Decoder(znodes.parse_lock, znodes.lock_to_bytes("host")),
    "vote": Decoder(znodes.parse_vote, znodes.vote_to_bytes("host")),
    "layout of marks": Decoder(
        znodes.check_layout, znodes.LAYOUT_DATA, (CorruptionError, SettingsError)
    ),
    "recovery delay": Decoder(znodes.parse_recovery_delay, b"30"),
    "audit time": Decoder(znodes.parse_audit_time, znodes.audit_time_to_bytes(1)),
    "waiting note": Decoder(WaitingNote.parse, NOTE),
    "stored racks": Decoder(StoredRacks.parse, b'{"version":1,"racks":{"a:1":"/r"}}'),
    "Pulsar's racks": Decoder(parse_pulsar_racks, RACKS),
    "Pulsar's groups": Decoder(parse_pulsar_groups, RACKS),
    "isolation": Decoder(isolation, b'{"policyClass": "c", "properties": {"a": []}}', ()),
    "rack file": Decoder(
        lambda data: parse_rack_file(data.decode("latin-1")), b"a:1 = /r # comment\n"
    ),
    "Java's settings": Decoder(java_file, b"a=${b:-\\u0041}, c\n", (SettingsError,)),
    "SASL": Decoder(
        answer_challenge,
        b'realm="r",nonce="n\\"",qop="auth",algorithm=md5-sess,charset=utf-8',
        (UnauthorizedError,),
    ),
    "frames": Decoder(drained, frame(b"packet") * 2),
    "V2 reply": Decoder(v2.decode, bytes.fromhex("02010000" + "00" * 20)),
    "V3 reply": Decoder(v3.decode, bytes.fromhex("0a0608031002180110001800")),
    "V3 handshake": Decoder(v3.decode_handshake, bytes.fromhex("0a06080310091801100018002000")),
    "entry header": Decoder(EntryHeader.of, bytes(32), (DigestMismatchError,)),
    "checkpoint": Decoder(
        lambda data: CheckpointDecoder().decode(data),
        encode_checkpoint(Checkpoint(2, 1, 1, []))[0],
    ),
    "page of a base": Decoder(decode_page, encode_page([1, 2], [3, 4])),
    "record of a client": Decoder(
        lambda data: decode_client(data, path="/"), b'{"format":1,"epoch":1,"receipts":[]}'
    ),
    "ZooKeeper's srvr": Decoder(
        lambda told: parse_server(told, "a"), b"Zookeeper version: 3.9.5-1\nMode: leader\n", ()
    ),
}
ALL = pytest.mark.parametrize("decoder", DECODERS.values(), ids=DECODERS.keys())


@ALL
@given(data=st.binary(max_size=200))
def test_any_bytes_are_accepted_or_refused_as_documented(decoder: Decoder, data: bytes) -> None:
    decoder.accepts_or_refuses(data)


@ALL
@given(data=st.data())
def test_damaged_bytes_are_accepted_or_refused_as_documented(
    decoder: Decoder, data: st.DataObject
) -> None:
    decoder.decode(decoder.valid)
    bytes_, length = decoder.valid, len(decoder.valid)
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, length))
        stop = data.draw(st.integers(start, min(length, start + 8)))
        bytes_ = bytes_[:start] + data.draw(st.binary(max_size=8)) + bytes_[stop:]

    decoder.accepts_or_refuses(bytes_)


SMALL, TIMES, LINEAR_TIMES = 2_000, 8, 24
"""Eight times the bytes may take up to 24 times as long. A quadratic decoder needs 64 times."""
MEASURABLE_S = 2e-3
PIECES = (
    *(
        b"a",
        b" ",
        b"\t",
        b"\n",
        b"\r\n",
        b",",
        b"=",
        b'"',
        b"'",
        b"\\",
        b"\\\\",
        b'\\"',
        b"/",
        b"-",
    ),
    *(b"a=", b'a="",', b'"a"', b"0", b"9", b"a:1\t", b"#", b"{", b"[", b'{"a":', b"segment {\n"),
    *(b"${", b":-", b"a=${", b"a\\\n"),
    *(b'a: "b"\n', b"1\t", b"0\ta:1\n", b'ensembleMember: "a:1" ', b"\0", b"\xff", b"\x80"),
    *(b"\x0a\x00", b"\x32\x00", b"\x91", b"\xc1", b"\0\0\0\x01a", b"version: 1.", b"\xc3\xa4"),
)


@ALL
def test_eight_times_the_bytes_take_no_more_than_linear_time(decoder: Decoder) -> None:
    """Each piece is repeated alone, behind the valid bytes, in their middle, and in their first
    string."""
    valid = decoder.valid
    cuts = {len(valid), len(valid) // 2, valid.find(b'"') + 1}
    places = [(b"", b""), *((valid[:cut], valid[cut:]) for cut in sorted(cuts))]
    for piece in PIECES:
        for head, tail in places:
            few, many = (piece * (size // len(piece)) for size in (SMALL, SMALL * TIMES))
            limit_s = LINEAR_TIMES * max(MEASURABLE_S, decoder.cost_s(head + few + tail))
            assert decoder.cost_s(head + many + tail) <= limit_s, (piece, head)
