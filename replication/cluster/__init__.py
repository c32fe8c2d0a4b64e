"""Who and what there is, and what operators want of it.

``cluster_view`` is all of it at one moment; ``membership`` our own sessions; ``orders`` and
``order_book`` what is ordered; ``racks`` and ``room`` where bookies are, and how full;
``isolation`` where Pulsar wants copies to stay; ``rack_memory`` where those were that are away;
``activity`` at which bookies clients are active; ``own_state`` our znodes' paths, and how what
stands in them is read; ``shared_clock`` the time that all nodes agree on.
"""
