"""The bulk data path: entries read, verified and copied without a task, future or object for each.

In reading order: ``transfers``, the way in; ``job``, what becomes of one transfer's entries;
``source``, the connections read from, with the one hot loop; ``target``, those written to;
``lane`` and ``inbox``, what both kinds of connection share; ``frames``, the bytes.
"""
