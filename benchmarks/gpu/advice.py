"""What the first measurements on a GPU say about constants of the code and about goals. Standard library only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from statistics import median
from typing import Any

Result = Mapping[str, Any]  # the JSON of a part

# Goals for one H200: fractions of the best library call, and MFU by model and tokens of a micro-batch.
KERNEL, RING = 0.95, 0.85
MFU = {("1b", 8192): 0.50, ("llama3-8b", 8192): 0.60, ("1b", 65536): 0.50, ("llama3-8b", 65536): 0.50}
LONG_MFU = 0.45  # of other models and lengths
PLANS_MFU = 0.48  # of steps of real plans
BUSY = 0.95  # fraction of a micro-batch in which a kernel runs
STALL = 0.05  # of the time of a step, because its shapes are new
APART = 1.25  # ratio of a measured rate and the data sheet's from which on it is worth a line
PLANS = "engine/attention/kernels/plans.py"
CALIBRATION = "engine/cost/calibration.py"
SHEETS = "engine/cost/datasheets.py"


def advice(results: Mapping[str, Result]) -> list[str]:
    """Return a line per finding, in the order of the parts: a constant to replace, a missed goal, or a failure."""
    lines = []
    for part, result in results.items():
        found = [f"failed: {_case(row)}: {row['error']}" for row in result.get("rows", [result]) if "error" in row]
        try:
            found += RULES.get(part, _missed_targets)(result)
        except (KeyError, ZeroDivisionError, ValueError) as error:
            found.append(f"its JSON is incomplete ({type(error).__name__}: {error})")
        lines += [f"{part}: {line}" for line in found]
    return lines


def _rows(result: Result, **wanted: object) -> list[Any]:
    """The rows without an error whose keys have the wanted values."""
    return [
        row
        for row in result["rows"]
        if "error" not in row and all(row.get(key) == value for key, value in wanted.items())
    ]


def _case(row: Result) -> str:
    return ", ".join(str(value) for key, value in row.items() if key != "error" and isinstance(value, (str, int)))


def _missed_targets(result: Result) -> Iterator[str]:
    for row in result.get("rows", []):
        if not row.get("holds", True):
            yield f"missed: {row['case']}: {row['said']} (target: {row['target']})"


def _machine(result: Result) -> Iterator[str]:
    missing = [name for name, version in result["packages"].items() if version is None]
    if missing:
        yield f"not installed: {', '.join(missing)}"
    if "kernel" in result:
        yield f"attention by {result['kernel']}"


def _tests(result: Result) -> Iterator[str]:
    for row in _rows(result):
        for name, reason in row["failed"].items():
            yield f"{name} failed: {reason}"


def _probe(result: Result) -> Iterator[str]:
    if builds := _rows(result, question="builds"):
        forward, backward = (
            median(row[f"first_{way}_ms"] - row[f"then_{way}_ms"] for row in builds) / 1e3
            for way in ("forward", "backward")
        )
        yield f"set PLAN_BUILD_S in {CALIBRATION}: a plan took {forward:.3f} s forward, {backward:.3f} s backward"
    if rates := _rows(result, question="rates"):
        longest = max(row["length"] for row in rates)
        for head_dim in sorted({row["head_dim"] for row in rates}):
            rate = {
                row["kernel"]: (row["forward_tflops"], row["backward_tflops"])
                for row in rates
                if (row["length"], row["head_dim"]) == (longest, head_dim)
            }
            saved = median(
                1e-12 / varlen - 1e-12 / fast for varlen, fast in zip(rate["varlen"], rate["cudnn"], strict=True)
            )
            yield f"set PlanCosts.saved_s_per_flop in {PLANS}: {saved:.2g} s at {longest} tokens, head size {head_dim}"
    for row in _rows(result, question="low"):
        if any(row["not_finite"]):
            shape = f"{row['queries']} queries and {row['keys']} keys"
            yield f"{row['kernel']} gives {row['not_finite']} non-finite dq, dk, dv for {shape}: see `batch` in {PLANS}"
    for row in _rows(result, question="ring"):
        if not row["holds"]:
            ring = f"a ring of {row['ranks']}, {row['merge']} merge"
            yield f"{ring}, is wrong at {row['tokens']} tokens: errors {row['errors']}"
    for row in _rows(result, question="agreement"):
        if max(row["difference"]) > 0.05:
            yield f"the kernels differ at {row['queries']} x {row['keys']}: {row['difference']}"


def _attention(result: Result) -> Iterator[str]:
    groups: dict[str, list[Any]] = {}
    for row in _rows(result):
        groups.setdefault(row["group"], []).append(row)
    for group, rows in groups.items():
        kind = group.split()[0].rstrip(",")
        ours = [row for row in rows if row["kernel"].startswith("ours")]
        library = [row for row in rows if row["kernel"].endswith(", raw")]
        best = max(library or rows, key=lambda row: row["tflops_per_s"])
        goal = {"kernels": KERNEL, "ring": RING}.get(kind, 0.0)
        for row in ours:
            reached = row["tflops_per_s"] / best["tflops_per_s"]
            if reached < goal:
                yield f"{group}: {reached:.2f} of {best['kernel']}, goal {goal}"
        for row in rows:
            if row["kernel"].endswith("uncompiled merge"):
                yield f"{group}: {row['tflops_per_s'] / best['tflops_per_s']:.2f} with the uncompiled merge"
        if kind == "plan":
            stalls = [row["first_ms"] - row["ms"] for row in ours]
            again = median(row["ms"] for row in ours)
            yield f"steps of plans: {again:.0f} ms, with new shapes {median(stalls):.0f} ms longer"


def _train(result: Result) -> Iterator[str]:
    rows = _rows(result, section="cases") + _rows(result, section="missing")
    with_cudnn = {(row["model"], row["tokens"]) for row in rows if row["kernel"] == "cudnn"}
    for row in rows:
        # Goals are for the selected kernel. If that is cuDNN, another row has the varlen kernel, for comparison.
        compared = row["kernel"] == "torch_varlen" and (row["model"], row["tokens"]) in with_cudnn
        goal = 0.0 if compared else MFU.get((row["model"], row["tokens"]), LONG_MFU)
        verdict = "" if row["mfu"] >= goal else f", goal {goal} MISSED"
        yield f"{row['model']} at {row['tokens']} with {row['kernel']}: MFU {row['mfu']:.3f}{verdict}"
    planned = _rows(result, section="plan")
    best = max((row["mfu"] for row in planned), default=0.0)
    for row in planned:
        verdict = f", goal {PLANS_MFU} MISSED" if row["mfu"] == best < PLANS_MFU else ""
        yield f"steps of real plans of {row['model']} with {row['kernel']}: MFU {row['mfu']:.3f}{verdict}"
        new, seen = sum(row["new_s"]), sum(row["seen_s"])
        if new / seen - 1 > STALL:
            where = f"a step of {row['model']} with {row['kernel']}"
            yield f"new shapes cost {new / seen - 1:.0%} of {where}: see PlanCosts in {PLANS}"
    for row in _rows(result, section="trace"):
        if row["busy"] < BUSY:
            yield f"kernels run {row['busy']:.0%} of the time, {row['launches']} launches: the host is too slow"


def _training(result: Result) -> Iterator[str]:
    for row in _rows(result):
        seconds = [line["step_s"] for line in row["steps"]]
        if seconds:
            later = median(seconds[len(seconds) // 2 :])
            yield f"{row['run']} run: its first step took {seconds[0]:.2f} s, later ones {later:.2f} s"
        if not row["holds"]:
            yield f"{row['run']} run: it has the wrong steps: {[line['step'] for line in row['steps']]}"


def _profile(result: Result) -> Iterator[str]:
    for row in _rows(result):
        measured, sheet = row["hardware"], row["data_sheet"]
        for term, nominal in sheet.items():
            value = measured.get(term)
            if isinstance(nominal, str) or term in measured["nominal"] or not nominal or not value:
                continue
            if not 1 / APART < value / nominal < APART:
                yield f"{term} is {value:.3g}, {value / nominal:.2f} times the value in {SHEETS}"
        if measured["fit"]["median_error"] > 0.15:
            yield f"the cost model's median error is {measured['fit']['median_error']:.0%}"


def _peaks(result: Result) -> Iterator[str]:
    yield from _missed_targets(result)
    errors = [row["peak"] / row["estimate"] - 1 for row in _rows(result)]
    if errors:
        yield f"peaks are {min(errors):+.1%} to {max(errors):+.1%} from the estimate: see engine/cost/allowance.py"


RULES: dict[str, Callable[[Any], Iterator[str]]] = {
    "machine": _machine,
    "tests": _tests,
    "probe": _probe,
    "attention": _attention,
    "train": _train,
    "train-missing": _train,
    "train-plan": _train,
    "train-trace": _train,
    "training": _training,
    "profile": _profile,
    "memory-peak": _peaks,
}
