"""Which unconfirmed entries were acknowledged by whom. Arithmetic only: no bookie, no clock.

An entry is confirmed when A different bookie indexes of its write set acknowledged it and all lower
entries are confirmed. Indexes, not bookies: when a bookie is replaced, what it acknowledged of
unconfirmed entries counts no more, since the metadata will name another for them.
"""

from ledgers.striping import write_set


class AckWindow:
    """The entries added and not yet confirmed. ``confirmed``: the last entry id that is, -1 if
    none."""

    def __init__(
        self, *, confirmed: int, ensemble_size: int, write_quorum: int, ack_quorum: int
    ) -> None:
        self.confirmed = confirmed
        self._ensemble_size, self._write_quorum = ensemble_size, write_quorum
        self._ack_quorum = ack_quorum
        self._acks: dict[int, set[int]] = {}

    def begin(self, entry_id: int) -> tuple[int, ...]:
        """Expect acknowledgements of the next entry; the indexes that it has to be sent to."""
        assert entry_id == self.confirmed + len(self._acks) + 1, (entry_id, self.confirmed)
        self._acks[entry_id] = set()
        return self._write_set(entry_id)

    def acknowledge(self, entry_id: int, index: int) -> None:
        """Late acknowledgements, of entries that are confirmed, are of no consequence."""
        if entry_id in self._acks:
            self._acks[entry_id].add(index)

    def confirm(self) -> list[int]:
        """Confirm what can be, in order; the entry ids."""
        confirmed = []
        while len(self._acks.get(self.confirmed + 1, ())) >= self._ack_quorum:
            self.confirmed += 1
            del self._acks[self.confirmed]
            confirmed.append(self.confirmed)
        return confirmed

    def withdraw(self, index: int) -> list[int]:
        """Forget what this index acknowledged; the unconfirmed entries of its stripe."""
        striped = [entry_id for entry_id in self._acks if index in self._write_set(entry_id)]
        for entry_id in striped:
            self._acks[entry_id].discard(index)
        return striped

    def _write_set(self, entry_id: int) -> tuple[int, ...]:
        return write_set(
            entry_id, ensemble_size=self._ensemble_size, write_quorum=self._write_quorum
        )
