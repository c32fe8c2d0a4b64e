"""Byte counts as text for people."""

UNITS = ("B", "kB", "MB", "GB")


def size_text(byte_count: int) -> str:
    """Return a text like ``1.23 MB``: three digits, units in powers of 1,000."""
    size = float(byte_count)
    for unit in UNITS:
        if size < 999.5:  # else it would be rounded to four digits
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
