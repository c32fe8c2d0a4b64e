"""fsck: checks every ledger, copy by copy, and proves that the data is there. Runs on Spark.

``levels`` holds the levels and options of a run; ``verdicts`` the grades and findings of a ledger.
An executor runs ``inspecting``, the entry point. ``copies`` checks one ledger, and ``look`` its
copies. ``reads`` reads entries in bulk; ``comparing`` compares copies; ``sampling`` draws samples.
``judging`` turns answers into grades by the ``scale``; ``summing_up`` collects the verdict.
``executor`` opens session and connections; ``pace`` is its share of the run's ``budget``.
``running`` describes a run. ``ledger_ids`` lists ledgers, ``weighing`` estimates the reads, and
``unchanged`` finds ledgers to skip, each in a ``read_session``. ``spark`` runs the job, ``results``
stores its output, and ``publishing`` marks damaged ledgers for the daemon. Only ``auditor.fsck``
and its command import pyspark.
"""
