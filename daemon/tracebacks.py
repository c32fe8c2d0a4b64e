"""Tracebacks of bounded length, for any depth of calls and any number of failed tasks.

A permanent failure is logged again and again. Its tracebacks must neither fill the disk nor keep
the loop busy.
"""

import traceback

from daemon.threads import leaves

FRAMES_MAX = 12
"""Innermost frames kept of each traceback."""
ERRORS_MAX = 3
"""Errors kept of an exception group."""
LINES_MAX = 100


def bounded_traceback(error: BaseException) -> str:
    """Return the traceback of the error and its causes. A group is flattened into its errors."""
    single = leaves(error)
    parts = [_one(each) for each in single[:ERRORS_MAX]]
    if len(single) > ERRORS_MAX:
        parts.append(f"and {len(single) - ERRORS_MAX} more errors")
    lines = "\n".join(parts).split("\n")
    if len(lines) > LINES_MAX:  # the end matters most
        half = LINES_MAX // 2
        lines = [*lines[:half], f"... {len(lines) - 2 * half} lines ...", *lines[-half:]]
    return "\n".join(lines)


def _one(error: BaseException) -> str:
    told = traceback.TracebackException.from_exception(
        error, limit=-FRAMES_MAX, compact=True, max_group_width=1, max_group_depth=1
    )
    return "".join(told.format()).rstrip("\n")
