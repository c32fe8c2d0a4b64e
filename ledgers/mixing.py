"""A 64-bit mixing function for shares and samples that several processes must compute alike."""

_MASK = (1 << 64) - 1


def mix64(number: int) -> int:
    """Return 64 evenly distributed bits, the same in each process: splitmix64's finalizer."""
    number = (number + 0x9E37_79B9_7F4A_7C15) & _MASK
    number = ((number ^ (number >> 30)) * 0xBF58_476D_1CE4_E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D0_49BB_1331_11EB) & _MASK
    return number ^ (number >> 31)
