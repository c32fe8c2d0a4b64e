"""fsck on Spark: the only modules that import pyspark. Only the fsck command imports them.

Data sources for any query: ``sources`` registers what ``spark.read.format(...)`` reads; ``schemas``
has the columns. ``contents`` reads the rows, and ``ranges`` limits a query to the ledgers it names.
A run: ``job`` leads it. ``looks`` is the work of one task, in a Python ``process`` prepared for it.
``dispatch`` hands out tasks, ``streams`` carry their rows to the driver, ``session`` opens the
Spark context, and ``launch`` starts its JVM.
"""
