"""fsck: pure judging, planning, results; what needs a cluster is in tests/cluster."""
