"""The group of a single rank: its collectives copy, and no library creates a communicator for it.

DeepSpeed calls collectives on its groups whatever their size. A communicator of NCCL would take memory on the GPU for
each of them (NVIDIA/nccl#2363 reports 512 MiB).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_BACKEND = "alone"


def alone() -> dist.ProcessGroup:
    """Create the group of this rank only. `torch.distributed` must be initialised. Not collective."""
    group: dist.ProcessGroup = dist.new_group([dist.get_rank()], backend=_BACKEND, use_local_synchronization=True)
    return group


class _Done(dist.Work):
    """What was started on the current stream. To wait lets the stream that is current then wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self._event = torch.cuda.current_stream().record_event() if torch.cuda.is_initialized() else None

    def wait(self, timeout: Any = None) -> bool:
        """Wait, as for a collective of NCCL: the host does not."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
        return True

    def is_completed(self) -> bool:
        """Whether the device has finished."""
        return self._event is None or bool(self._event.query())


class _Alone(dist.ProcessGroup):
    """A process group of one rank. It has the methods that `torch.distributed` calls, by their names in its versions.

    Sums and broadcasts over one rank leave a tensor as it is; gathers, scatters and exchanges copy it.
    """

    def __init__(self) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]

    def getBackendName(self) -> str:  # noqa: N802 (PyTorch's name)
        """The name of the backend."""
        return _BACKEND

    def _get_backend(self, device: torch.device) -> Any:
        """PyTorch asks it whether it can be split, if the default group is bound to a device."""
        return self

    @property
    def supports_splitting(self) -> bool:
        """No communicator, so nothing to split."""
        return False

    def _keep(self, *_: Any, **__: Any) -> dist.Work:
        return _Done()

    def _copy(self, output: Tensor, source: Tensor, *_: Any, **__: Any) -> dist.Work:
        output.view(-1).copy_(source.reshape(-1))
        return _Done()

    def _copy_each(self, outputs: list[Any], sources: list[Any], *_: Any, **__: Any) -> dist.Work:
        for output, source in zip(outputs, sources, strict=True):  # one of the two is a list with a tensor of each rank
            self._copy(*(one[0] if isinstance(one, list) else one for one in (output, source)))
        return _Done()

    broadcast = allreduce = allreduce_coalesced = reduce = barrier = _keep
    _start_coalescing = _end_coalescing = _keep  # type: ignore[assignment]
    all_gather_single = _allgather_base = reduce_scatter_single = _reduce_scatter_base = _copy  # type: ignore[assignment]
    all_to_all_single = alltoall_base = _copy  # type: ignore[assignment]
    allgather = allgather_coalesced = reduce_scatter = alltoall = _copy_each  # type: ignore[assignment]
    all_gather_single_coalesced = allgather_into_tensor_coalesced = _copy_each  # type: ignore[assignment]
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced = _copy_each  # type: ignore[assignment]


dist.Backend.register_backend(_BACKEND, lambda *_: _Alone(), devices=["cpu", "cuda"])
