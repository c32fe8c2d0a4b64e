"""fsck: the proof, ledger by ledger and copy by copy, that the data is there. Runs on Spark.

``levels`` how closely it looks; ``verdicts`` what is said of a ledger. Nothing outside ``auditor.fsck`` and its
command imports pyspark.
"""
