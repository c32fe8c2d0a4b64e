"""Which bookies metadata names for certain, though it cannot be read as a whole."""

from itertools import pairwise

from ledgers.errors import CorruptionError
from ledgers.formats.bookie_info import parse_bookie_id
from ledgers.formats.bookkeeper_metadata_pb2 import LedgerMetadataFormat
from ledgers.formats.metadata_codec import split_version, undelimited
from ledgers.formats.protobuf import parse_binary
from ledgers.metadata import BookieId


def may_name(data: bytes, bookie: BookieId) -> bool:
    """Whether unreadable metadata may name the bookie: unless it is proven that it names others
    only.

    An id that is nowhere in the bytes proves nothing by itself: they may be cut short, or empty.
    """
    if bookie.encode() in data:  # every format holds ids in plain text
        return True
    named = named_bookies(data)
    return named is None or bookie in named


def named_bookies(data: bytes) -> frozenset[BookieId] | None:
    """All that its ensembles name; None where they may not be all, or be something else.

    Only a record that tells its own length can be shown to be whole: that of version 3, and of a
    later version that still is one. Its ensembles must be as ensembles are; the rest of it may be
    what it likes, such as a state or a digest type that we do not know.
    """
    try:
        version, body = split_version(data)
        if version < 3:
            return None
        message = parse_binary(undelimited(body), LedgerMetadataFormat)
        ensembles = [[parse_bookie_id(b) for b in each.ensembleMember] for each in message.segment]
    except CorruptionError:
        return None
    starts = [segment.firstEntryId for segment in message.segment]
    ascend = starts[:1] == [0] and all(here < after for here, after in pairwise(starts))
    are_full = all(len(ensemble) == message.ensembleSize > 0 for ensemble in ensembles)
    if not (ascend and are_full):
        return None
    return frozenset(bookie for ensemble in ensembles for bookie in ensemble)
