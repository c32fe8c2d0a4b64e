"""A ZooKeeper that refuses some writes of a session: its quota is used up, or ACLs deny them."""

from collections.abc import Callable, Sequence

from ledgers.errors import BookmenderError
from ledgers.store import Create, MultiFailed, Operation, OperationResult, SetData
from tests.memory.store import MemoryStore


def refuse(
    store: MemoryStore, is_refused: Callable[[Operation], bool], error: type[BookmenderError]
) -> None:
    """Refuse these writes of the session."""
    multi = store.multi

    async def unless_refused(operations: Sequence[Operation]) -> list[OperationResult]:
        for index, operation in enumerate(operations):
            if is_refused(operation):
                raise MultiFailed(index, error("refused"))
        return await multi(operations)

    store.multi = unless_refused  # type: ignore[method-assign]


def writes_below(path: str) -> Callable[[Operation], bool]:
    return lambda each: isinstance(each, Create | SetData) and each.path.startswith(path)
