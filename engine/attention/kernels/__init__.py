from engine.attention.kernels.call import Call, Kernel, wider
from engine.attention.kernels.choice import choose

__all__ = ["Call", "Kernel", "choose", "wider"]
