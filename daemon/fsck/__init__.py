"""Runs fsck for the command line: settings, Spark, progress and results.

``runner`` is one run, and ``spark_environment`` the variables that Spark starts with. ``changes``
follows the change feed. ``texts`` is what the commands print, and ``advice`` what an operator
should do.
"""
