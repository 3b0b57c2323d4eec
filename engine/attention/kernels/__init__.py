"""The one seam for attention kernels: packed sequences in, output and log-sum-exp out; and the gradients."""

from engine.attention.kernels.call import Call, Kernel, wider
from engine.attention.kernels.choice import choose

__all__ = ["Call", "Kernel", "choose", "wider"]
