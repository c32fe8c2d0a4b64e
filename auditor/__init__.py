"""The leader: it notices lost bookies and publishes the ledgers that miss them.

``election`` who leads; ``index`` what it knows of every ledger; ``absence`` when a bookie is lost,
``delay`` how long that takes, ``outages`` of our own connection, which excuse it for a while;
``holding`` when so many go at once that nobody is, ``holds`` says so to all nodes; ``endangered``
what a loss means for a ledger, ``copyless`` whether it can still be read while bookies are away,
``marking`` publishes, in Java's queue or our own by ``java_sight``, ``losses`` does so for all
ledgers of a loss, ``relisting`` sees that they still stand; ``auditor`` puts these in order;
``causes`` and ``findings`` say why a ledger is marked, ``own_queue`` what is so where Java does not
look; ``draining`` marks for bookies that are to be emptied; ``recheck`` reads recent copies again;
``activity`` sees at which bookies clients are active; ``checks`` what is looked at from time to
time, ``fsck`` the proof that the data is there; ``records`` what a leader leaves behind, ``noting``
when; ``observer`` decides likewise without being the leader, and says so in ``observation``s;
``scan`` reads all metadata once, for commands; ``settings``.
"""
