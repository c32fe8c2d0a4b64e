"""fsck on Spark: the only modules that import pyspark. Only the fsck command imports them.

``session`` starts Spark, and ``dispatch`` runs the tasks of a run there.
"""
