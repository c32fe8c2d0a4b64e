"""Tests of fsck's pure parts: judging, planning, results.

Those that need a cluster are in tests/cluster.
"""
