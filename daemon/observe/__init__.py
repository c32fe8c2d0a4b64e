"""Looking on without doing anything: ``observing`` decides as a leader and its workers would,
``report`` says what it saw, for ``command`` and for a ``node`` whose settings let it do no more.
"""
