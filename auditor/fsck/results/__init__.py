"""What a run leaves behind, read and written as plain rows, without Spark.

``summary`` the counts, and the exit code.
"""
