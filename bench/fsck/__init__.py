"""Measures how fast fsck inspects ledgers at each level, compared with Java's check of all ledgers:
``python -m bench.fsck``.

``loads``: the ledgers. ``reading``: our inspections on bookies. ``java``: the check of Java's
auditor. ``znodes``: the metadata of very many ledgers. ``on_spark``: whole runs on Spark.
``processes``: CPU by process. ``records``, ``report``: the results.
"""
