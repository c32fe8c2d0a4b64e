"""``bookmender fsck``: the ``command``, the ``texts`` that it prints, and a run on Spark (``running``)."""
