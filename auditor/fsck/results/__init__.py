"""Writes and reads the results of a run, as plain rows, without Spark.

``plan`` is what a run will check, ``run_folder`` its files, written through ``files``; ``rows`` are
verdicts as rows; ``summary`` counts them; ``checked`` says when each ledger was checked last;
``cluster`` guards against mixing clusters. ``reading`` reads and compares runs, ``advice`` says what
to do, and ``report`` is the page for people.
"""
