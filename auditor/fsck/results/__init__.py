"""Writes and reads the results of a run, without Spark.

``plan`` is what a run will check, from ``checked``, which says when each ledger was checked last.
``run_folder`` are the run's files, ``rows`` its verdicts as rows, ``summary`` its counts, and
``cluster`` the cluster that they belong to; ``files`` and ``tables`` write them. ``changes`` and
``positions`` are for runs that follow the change feed. ``finished_runs``
reads and compares runs, and ``report`` is the page for people.
"""
