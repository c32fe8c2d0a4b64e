"""fsck on Spark. The only modules that import pyspark; nothing but the command of fsck imports
them.

For anyone's queries: ``sources`` registers what ``spark.read.format(...)`` reads, with the columns
of ``schemas``; ``contents`` is how it is read, ``ranges`` which ledgers a query is about. For a
run: ``job`` leads it, ``looks`` is what a task does, in a ``process`` set up for it; ``dispatch``
gives tasks out, ``streams`` bring their rows back, ``session`` is where, ``launch`` the start of
its JVM.
"""
