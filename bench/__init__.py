"""Measurements on real bookies: repairing against Java's AutoRecovery, and the copy path alone."""
