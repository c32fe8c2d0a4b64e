"""``bookmender status``: the ``state`` of a cluster's recovery in one word and many figures, from
what ``gathering`` reads, with what the ``leader`` says of itself and the ``pace`` of copying; as
JSON by ``records``, for people by ``verdict`` and ``command``.
"""
