"""The periodic checks of the leader.

``base`` is what a check is, and what all share; ``runner`` runs those that are due, and ``records``
stores how far each is. The checks: ``copies`` reads and counts copies, ``placement`` compares them
with the placement policy, and ``idle`` finds open ledgers without a writer.
"""
