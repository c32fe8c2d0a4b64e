"""fsck on Spark: the only modules that import pyspark. Only the fsck command imports them.

``session`` starts Spark, ``job`` is a run, and ``dispatch`` its tasks. ``sources`` offers a cluster
as Spark tables.
"""
