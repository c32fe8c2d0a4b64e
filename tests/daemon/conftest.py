"""The fixtures of several files."""

from tests.daemon.in_memory import in_memory as in_memory
