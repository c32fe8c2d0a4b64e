"""Writes and reads the results of runs, without Spark.

``plan`` is what a run checks, and when each ledger was last checked. ``run_folder`` are a run's
files, unfinished and finished, ``rows`` its verdicts as rows, ``summary`` its counts, and
``report`` the page for people. ``folder`` is the cluster that all runs of a folder belong to, and
how far they follow the change feed.
"""
