"""Tokens of ranges from the hosts that have packed their blocks.

```
 ranges --by the host of their block--> slices: all that are packed there, one call a host
                                        read: those that are not any more; the host packs them again
```
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial

from engine.data.arrays import to_bytes
from engine.data.blocks.blocks import BlockId, Lengths, Range, Slice
from engine.data.blocks.local_blocks import LocalBlocks
from engine.data.blocks.served import Served, joined, received_slices
from engine.remote.caller import Caller, RoleLostError

Start = Callable[[str, str, Sequence[Range]], Future[bytes]]  # calls `slices` or `read` of a host


def fetch(start: Start, owners: Mapping[BlockId, str], wanted: Sequence[Range]) -> list[Slice]:
    """Return the tokens of ranges, in their order. `owners` are the hosts of their blocks.

    Raises DataError and StorageError as `Blocks.slices`, RoleLostError if a host is gone.
    """
    found = dict[int, Slice]()
    for method in ("slices", "read"):
        of_host = defaultdict[str, list[int]](list)
        for number, one in enumerate(wanted):
            if number not in found:
                of_host[owners[BlockId(one.source, one.block)]].append(number)
        answers = [start(host, method, [wanted[number] for number in numbers]) for host, numbers in of_host.items()]
        for numbers, answer in zip(of_host.values(), answers, strict=True):
            slices = received_slices(answer.result())
            found |= {number: one for number, one in zip(numbers, slices, strict=True) if one is not None}
    return [found[number] for number in range(len(wanted))]


def read(blocks: LocalBlocks, wanted: Sequence[Range]) -> bytes:
    """Return the tokens of ranges as `received_slices` reads them. Raises errors as `Blocks.slices`."""
    return to_bytes(None, joined(blocks.slices(wanted)))


class HostBlocks:
    """The Blocks of a host that constructs: its own, and the slices of those of others.

    `owners` must have the blocks of what is read next.
    """

    def __init__(self, local: LocalBlocks, caller: Caller, role: str) -> None:
        self.local, self._caller, self._role = local, caller, role
        self._own: Mapping[str, Callable[[Sequence[Range]], bytes]]
        self._own = {"slices": Served(local).slices, "read": partial(read, local)}
        self.owners: Mapping[BlockId, str] = {}
        self.tokens = 0  # that were read

    def slices(self, wanted: Sequence[Range]) -> list[Slice]:
        try:
            found = fetch(self._start, self.owners, wanted)
        except RoleLostError:  # its blocks are a pure function of their files
            found = self.local.slices(wanted)
        self.tokens += sum(len(one.tokens) for one in found)
        return found

    def _start(self, host: str, method: str, wanted: Sequence[Range]) -> Future[bytes]:
        if host != self._role:
            return self._caller.start(host, method, wanted)
        answer: Future[bytes] = Future()
        answer.set_result(self._own[method](wanted))
        return answer

    # What the constructor does not use is left to the host itself.
    def ask(self, wanted: Iterable[BlockId]) -> None:
        self.local.ask(wanted)

    def lengths(self, block: BlockId) -> Lengths:
        return self.local.lengths(block)

    def keep(self, wanted: Iterable[BlockId]) -> None:
        self.local.keep(wanted)

    def close(self) -> None:
        self.local.close()
