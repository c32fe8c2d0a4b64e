"""Unreadable metadata may still prove which bookies it does not name."""

import pytest

from ledgers.codec.metadata import may_name, serialize_metadata
from ledgers.model import BookieId, LedgerMetadata, LedgerState, Segment

HERE, THERE, ELSEWHERE = BookieId("b1:3181"), BookieId("b2:3181"), BookieId("b3:3181")


def written(*ensembles: tuple[BookieId, ...], version: int = 3) -> bytes:
    return serialize_metadata(
        LedgerMetadata(
            metadata_version=version,
            ensemble_size=2,
            write_quorum=2,
            ack_quorum=2,
            state=LedgerState.OPEN,
            length=0,
            last_entry_id=-1,
            digest_type=None,
            password=None,
            segments=tuple(
                Segment(first_entry_id=10 * place, ensemble=ensemble)
                for place, ensemble in enumerate(ensembles)
            ),
            has_ack_quorum=version > 1,
        )
    )


WHOLE = written((THERE, ELSEWHERE), (ELSEWHERE, THERE))


def of_version_4(data: bytes) -> bytes:
    return data.replace(b"Version\t3", b"Version\t4")


@pytest.mark.parametrize(
    ("data", "may"),
    [
        pytest.param(of_version_4(WHOLE), False, id="a later version that is as version 3 was"),
        pytest.param(WHOLE, False, id="all that it names are others"),
        pytest.param(WHOLE.replace(b"b2:3181", b"b1:3181"), True, id="it names it"),
        pytest.param(WHOLE + b"b1:3181", True, id="its id is behind the end"),
        pytest.param(b"", True, id="empty"),
        pytest.param(WHOLE[:-1], True, id="cut short by a byte"),
        pytest.param(WHOLE[:35], True, id="cut short before any bookie"),
        pytest.param(b"rubbish that names b2:3181 and b3:3181", True, id="no metadata"),
        pytest.param(written((THERE, ELSEWHERE), version=1), True, id="lines may be missing"),
        pytest.param(written((THERE, ELSEWHERE), version=2), True, id="text may be missing"),
        pytest.param(
            WHOLE.replace(b"b2:3181", b"b\n:3181", 1), True, id="an id that is impossible"
        ),
        pytest.param(WHOLE.replace(b"b2:3181", b"b\xff:3181", 1), True, id="an id without letters"),
        pytest.param(WHOLE.replace(b"\x10\x02", b"\x10\x03"), True, id="ensembles lack a bookie"),
    ],
)
def test_only_a_complete_record_proves_that_it_names_others(data: bytes, may: bool) -> None:
    assert may_name(data, HERE) is may


def test_metadata_without_an_ensemble_proves_nothing() -> None:
    whole = written((THERE, ELSEWHERE))
    later_only = whole.replace(b"\x10\x00", b"\x10\x05")  # its one segment begins at entry 5
    assert later_only != whole

    assert may_name(later_only, HERE)
