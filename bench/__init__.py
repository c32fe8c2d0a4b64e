"""Measurements on real bookies: repairs, compared with Java's AutoRecovery, and the copy path
alone."""
