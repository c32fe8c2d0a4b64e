"""fsck on Spark. The only modules that import pyspark; nothing but the command of fsck imports them.

For anyone's queries: ``sources`` registers what ``spark.read.format(...)`` reads.
"""
