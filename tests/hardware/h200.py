"""What `profile-hardware recipe=h200-1b-8k` measured on an H200 (benchmarks/RESULTS.md, "One H200", second run)."""

from __future__ import annotations

from engine.hardware.measured import Case

# Seconds of micro-batches, forward and backward together, with PyTorch's varlen kernel.
MICRO_BATCHES = {
    Case(2, (32,)): 0.01128,
    Case(4, (32,)): 0.01785,
    Case(4, (64,)): 0.01726,
    Case(2, (128,)): 0.01077,
    Case(4, (24, 40) * 2): 0.01765,
    Case(4, (128,)): 0.01767,
    Case(4, (256,)): 0.01673,
    Case(2, (512,)): 0.01026,
    Case(4, (24, 40) * 8): 0.01707,
    Case(4, (96, 160) * 2): 0.01729,
    Case(4, (512,)): 0.01783,
    Case(4, (96, 160) * 4): 0.01835,
    Case(4, (384, 640)): 0.01776,
    Case(4, (1024,)): 0.01682,
    Case(4, (24, 40) * 32): 0.01831,
    Case(4, (96, 160) * 16): 0.01944,
    Case(4, (2048,)): 0.01763,
    Case(4, (384, 640) * 4): 0.01788,
    Case(4, (96, 160) * 32): 0.02547,
    Case(4, (384, 640) * 8): 0.02570,
    Case(4, (1536, 2560)): 0.01972,
    Case(4, (4096,)): 0.02001,
    Case(4, (1536, 2560) * 2): 0.02833,
    Case(4, (8192,)): 0.03891,
    Case(4, (16384,)): 0.09896,
    Case(4, (32768,)): 0.29876,
    Case(4, (65536,)): 1.01284,
}
