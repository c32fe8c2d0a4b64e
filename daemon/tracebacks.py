"""Tracebacks that stay short, however deep the calls and however many tasks failed at once.

What fails again and again is logged again and again: a disk that is full must not be the end of the
next one, nor the loop be busy with the formatting.
"""

import traceback

from daemon.threads import leaves

FRAMES_MAX = 12
"""Of each traceback, the innermost."""
ERRORS_MAX = 3
"""Of a group, in which tasks that failed together come."""
LINES_MAX = 100


def bounded_traceback(error: BaseException) -> str:
    """The error with its causes; of a group its single errors, without the groups in between."""
    single = leaves(error)
    parts = [_one(each) for each in single[:ERRORS_MAX]]
    if len(single) > ERRORS_MAX:
        parts.append(f"and {len(single) - ERRORS_MAX} more errors")
    lines = "\n".join(parts).split("\n")
    if len(lines) > LINES_MAX:  # the end says most
        half = LINES_MAX // 2
        lines = [*lines[:half], f"... {len(lines) - 2 * half} lines ...", *lines[-half:]]
    return "\n".join(lines)


def _one(error: BaseException) -> str:
    told = traceback.TracebackException.from_exception(
        error, limit=-FRAMES_MAX, compact=True, max_group_width=1, max_group_depth=1
    )
    return "".join(told.format()).rstrip("\n")
