"""fsck on Spark: the only modules that import pyspark. Only the fsck command imports them.

``session`` opens Spark, ``job`` is a run, ``dispatch`` its tasks, and ``sources`` offers a cluster as
Spark tables.
"""
