"""Numbers of bytes in a form for people."""

import pytest

from ledgers.sizes import size_text


@pytest.mark.parametrize(
    ("byte_count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1_000, "1 kB"),
        (1_234_567, "1.23 MB"),
        (999_499, "999 kB"),
        (999_500, "1 MB"),
        (5 * 10**9, "5 GB"),
        (999_600_000_000, "1 TB"),
        (12_345 * 10**9, "12.3 TB"),
    ],
)
def test_a_size_has_three_digits_and_a_unit(byte_count: int, text: str) -> None:
    assert size_text(byte_count) == text
