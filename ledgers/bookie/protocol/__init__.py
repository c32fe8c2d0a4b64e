"""The bookies' wire protocols as pure functions of bytes: no socket, no clock, no task in here.

- ``messages``: what is asked and what is answered, the same for both protocols.
- ``status``: one table of status codes, and the one error that each of them means.
- ``frames``: length-prefixed packets out of a stream of bytes.
- ``v2``: the fixed binary layouts; the only protocol with batch reads.
- ``v3``: protobuf messages; the only one with LAC reads, LAC writes and lists of entries.
- ``availability``: the list of the entries that a bookie stores of a ledger.
"""
