"""The leader: it notices lost bookies and marks the ledgers that miss their copies.

``election`` decides which node leads, and ``index`` holds what the leader knows of every ledger.
``absence`` decides when a bookie is lost, after the ``delay``; ``outages`` of our own connection
postpone that. ``holding`` decides when so many bookies disappear at once that none counts as lost;
``holds`` orders that. ``endangered`` says what a loss means for a ledger. ``copyless`` counts
ledgers that cannot be read while bookies are absent. ``marking`` writes marks, in the shared queue
or our own as ``java_sight`` decides. ``losses`` marks all ledgers of a loss, and ``relisting``
restores marks that disappeared. ``auditor`` runs these steps in order. ``causes`` and ``findings``
say why a ledger is marked; ``own_queue`` reads the marks that Java does not see. ``draining`` marks
the ledgers of draining bookies. ``recheck`` reads recent copies again. ``activity`` finds the
bookies with active clients. ``checks`` are the periodic checks, and ``fsck`` proves that the data
is there. ``records`` are the leader's znodes, and ``noting`` keeps those on absences current.
``observer`` takes the same decisions without leading, and returns each as an ``observation``.
``scan`` reads all metadata once, for commands. ``settings`` are the operator's.
"""
