"""The leader: it notices lost bookies and publishes the ledgers that miss them.

``election`` who leads; ``absence`` when a bookie is lost, ``holding`` when so many go at once that nobody is,
``holds`` says so to all nodes; ``scan`` reads all metadata, ``endangered`` says
what a loss means for a ledger, ``marking`` publishes; ``auditor`` puts these in order; ``draining`` does
the like for bookies that are to be emptied; ``records`` what a leader leaves behind; ``observer`` decides likewise without being
the leader, and says so in ``observation``s; ``settings``.
"""
