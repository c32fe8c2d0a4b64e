"""``bookmender fsck``.

``command`` is the command line, ``runner`` one run on Spark, and ``spark_environment`` the
variables that Spark starts with. ``texts`` is what the commands print, and ``advice`` what an
operator should do.
"""
