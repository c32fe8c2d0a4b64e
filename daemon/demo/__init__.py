"""The demonstration: real bookies, one of them killed, and the proof that nothing was lost.

``shapes`` what is written, ``workload`` writes it, ``trying`` does for ``local write``, ``nodes``
runs the daemons, ``watching`` tells what happens, ``proof`` reads every copy, ``scenario`` puts
these in order, ``command`` prints.
"""
