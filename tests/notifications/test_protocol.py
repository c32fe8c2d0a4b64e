"""Frames, and what fits into them."""

from notifications.protocol import (
    CHANGES_A_FRAME,
    FRAME_BYTES_MAX,
    KEYS_A_REGISTER,
    NAME_BYTES_MAX,
    Change,
    Changes,
    Register,
    check_key,
    encode,
    published,
)

LONGEST = check_key(published('"' * NAME_BYTES_MAX))
ZXID = (1 << 53) - 1


def test_a_frame_of_the_longest_keys_is_accepted() -> None:
    changes = [Change(LONGEST, ZXID, True)] * CHANGES_A_FRAME
    add = [(LONGEST, ZXID)] * KEYS_A_REGISTER

    assert len(encode(Changes(positions={}, n=1, changes=changes))) < FRAME_BYTES_MAX
    assert len(encode(Register(n=1, add=add))) < FRAME_BYTES_MAX
