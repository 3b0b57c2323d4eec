"""What is made of the parts' results, by results that are made up."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.advice import advice


def build(forward: float, backward: float) -> dict[str, Any]:
    first = {"first_forward_ms": forward + 1, "first_backward_ms": backward + 2}
    return {"question": "builds", **first, "then_forward_ms": 1.0, "then_backward_ms": 2.0}


def rate(kernel: str, forward: float, backward: float, length: int = 65536) -> dict[str, Any]:
    rates = {"forward_tflops": forward, "backward_tflops": backward}
    return {"question": "rates", "head_dim": 128, "length": length, "kernel": kernel, **rates}


def attention(group: str, kernel: str, rate: float, **more: float) -> dict[str, Any]:
    return {"group": group, "kernel": kernel, "tflops_per_s": rate, **more}


def case(model: str, tokens: int, kernel: str, mfu: float) -> dict[str, Any]:
    return {"section": "cases", "model": model, "tokens": tokens, "kernel": kernel, "mfu": mfu}


def plan(kernel: str, mfu: float, new_s: list[float]) -> dict[str, object]:
    return {"section": "plan", "model": "1b", "kernel": kernel, "mfu": mfu, "new_s": new_s, "seen_s": [2.0, 2.0]}


CASES: list[tuple[str, dict[str, Any], list[str]]] = [
    ("machine", {"packages": {"a": "1", "b": None}, "kernel": "cudnn"}, ["not installed: b", "attention by cudnn"]),
    ("machine", {"packages": {}, "case": "attention kernel", "error": "no"}, ["failed: attention kernel: no"]),
    ("tests", {"rows": [{"failed": {"x::y": "NaN"}}]}, ["x::y failed: NaN"]),
    ("tests", {"rows": [{"failed": {}}]}, []),
    ("probe", {"rows": [build(400, 500), build(440, 550), build(900, 600)]}, ["0.440 s forward, 0.550 s backward"]),
    # 1 / 250 - 1 / 500 and 1 / 200 - 1 / 400 of 1e-12
    (
        "probe",
        {"rows": [rate("cudnn", 500, 400), rate("varlen", 250, 200), rate("cudnn", 1, 1, 8192)]},
        ["saved_s_per_flop in engine/attention/kernels/plans.py: 2.2e-15 s at 65536 tokens, head size 128"],
    ),
    (
        "probe",
        {"rows": [{"question": "low", "queries": 1, "keys": 64, "kernel": "cudnn", "not_finite": [0, 9, 9]},
                  {"question": "low", "queries": 2, "keys": 64, "kernel": "varlen", "not_finite": [0, 0, 0]}]},
        ["cudnn gives [0, 9, 9] non-finite dq, dk, dv for 1 queries and 64 keys"],
    ),
    (
        "probe",
        {"rows": [{"question": "ring", "tokens": 67, "merge": "compiled", "ranks": 4, "errors": [1.0],
                   "holds": False},
                  {"question": "agreement", "queries": 8, "keys": 4, "difference": [0.0, 0.2]},
                  {"question": "low", "error": "RuntimeError: x"}]},
        ["failed: low: RuntimeError: x", "a ring of 4, compiled merge, is wrong at 67 tokens",
         "the kernels differ at 8 x 4"],
    ),
    (
        "attention",
        {"rows": [attention("kernels 8K, forward", "cudnn, raw", 600),
                  attention("kernels 8K, forward", "ours (c)", 540),
                  attention("ring, forward", "ours (c)", 520), attention("ring, forward", "cudnn, raw", 600),
                  attention("ring, forward", "cudnn, uncompiled merge", 480),
                  attention("packing, forward", "ours (c)", 100), attention("packing, forward", "ours (d)", 600),
                  attention("plan, forward + backward", "ours (c)", 500, ms=40.0, first_ms=2040.0)]},
        ["kernels 8K, forward: 0.90 of cudnn, raw, goal 0.95", "ring, forward: 0.80 with the uncompiled merge",
         "steps of plans: 40 ms, with new shapes 2000 ms longer"],
    ),
    (
        "train",
        {"rows": [case("1b", 8192, "cudnn", 0.46), case("1b", 8192, "torch_varlen", 0.36),
                  case("8b", 8192, "torch_varlen", 0.3), case("8b", 65536, "flash_attn_3", 0.46),
                  case("llama3-8b", 8192, "cudnn", 0.55) | {"section": "missing"},
                  {"section": "cases", "model": "8b", "error": "no room"}]},
        ["failed: cases, 8b: no room", "1b at 8192 with cudnn: MFU 0.460, goal 0.5 MISSED",
         "1b at 8192 with torch_varlen: MFU 0.360", "8b at 8192 with torch_varlen: MFU 0.300, goal 0.45 MISSED",
         "8b at 65536 with flash_attn_3: MFU 0.460", "llama3-8b at 8192 with cudnn: MFU 0.550, goal 0.6 MISSED"],
    ),
    (
        "train-plan",
        {"rows": [plan("cudnn", 0.4, [3.0, 3.0]), plan("flash_attn_4", 0.45, [2.0, 2.0])]},
        ["steps of real plans of 1b with cudnn: MFU 0.400", "new shapes cost 50% of a step of 1b with cudnn",
         "steps of real plans of 1b with flash_attn_4: MFU 0.450, goal 0.48 MISSED"],
    ),
    ("train-trace", {"rows": [{"section": "trace", "busy": 0.8, "launches": 900}]}, ["kernels run 80% of the time"]),
    (
        "training",
        {"rows": [{"run": "first", "steps": [{"step_s": s} for s in (9.0, 3.0, 2.0, 2.0)], "holds": True},
                  {"run": "resumed", "steps": [{"step": 7, "step_s": 4.0}], "holds": False},
                  {"run": "third", "steps": [], "holds": False}]},
        ["first run: its first step took 9.00 s, later ones 2.00 s", "resumed run: its first step took 4.00 s",
         "resumed run: it has the wrong steps: [7]", "third run: it has the wrong steps: []"],
    ),
    (
        "profile",
        {"rows": [{"hardware": {"a_s": 3.0, "b_s": 1.1, "c_s": 9.0, "nominal": ["c_s"], "fit": {"median_error": 0.2}},
                   "data_sheet": {"cluster": "x", "a_s": 2.0, "b_s": 1.0, "c_s": 1.0, "d_s": 1.0}}]},
        ["a_s is 3, 1.50 times the value in engine/cost/datasheets.py", "the cost model's median error is 20%"],
    ),
    (
        "memory-peak",
        {"rows": [{"case": "1b", "peak": 11, "estimate": 10, "holds": False, "said": "11", "target": "5 %"},
                  {"case": "8b", "peak": 98, "estimate": 100, "holds": True}]},
        ["missed: 1b: 11 (target: 5 %)", "peaks are -2.0% to +10.0% from the estimate"],
    ),
    (
        "memory-time",
        {"rows": [{"case": "a", "holds": True}, {"case": "b", "holds": False, "said": "2 s", "target": "1 s"}]},
        ["missed: b: 2 s (target: 1 s)"],
    ),
    ("train", {}, ["its JSON is incomplete (KeyError: 'rows')"]),
]  # fmt: skip


def test_findings_of_parts() -> None:
    for part, result, expected in CASES:
        found = advice({part: result})
        assert len(found) == len(expected), found
        assert all(line.startswith(f"{part}: ") and words in line for line, words in zip(found, expected, strict=True))
