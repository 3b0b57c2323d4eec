"""Several ranks on one GPU over NCCL: process groups, rings, ZeRO, tensor, pipeline and expert parallelism, faults.

`python benchmarks/gpu/nccl.py [--only groups|training|faults] [--json FILE] [--dry-run]`. Needs NCCL 2.30 or newer;
ranks load prepared/nccl/libnccl.so.2 if it is there. Ranks take turns on the GPU, so no time here says anything about
several GPUs.

    groups    for each mesh: all its groups are made, sum and exchange the right values; MiB of GPU memory that each
              communicator took from all ranks together, with the 2 CTAs that this mode allows (`mib`). `left out` is a
              pipeline of four stages whose inner stages leave out the split for the tied weight: it must hang on NCCL
    training  `bytescale train` of small models on the GPU; the losses against those of one CPU process
    faults    errors of CUDA: which of them count as a failed GPU. A run whose rank is killed, and one whose rank is
              stopped (SIGSTOP): seconds, the operation of NCCL that the message and the report name, and losses after
              the restart

How a world of processes joins the groups of one mesh after the other, without importing torch for each:

    main     _World: 8 processes of this file, all on GPU 0      row(MESH): waits for MESH.0 ... MESH.N
               |  stdin: the list of meshes                        ^    none for 25 s: the mesh hangs, all
               v                                                   |    are killed, a new world takes the rest
    rank R   for each mesh with more than R ranks: join, sum over each group, exchange around the rings,
             leave, and write ANSWERS/MESH.R: right?, MiB of each communicator

The results are written after each case. Exit codes: 1 if a case fails, 4 if losses differ or what must hang does not, 3
without a CUDA device. --dry-run does all of it over gloo, with fewer meshes and steps.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace  # type: ignore[attr-defined]

from benchmarks.gpu import on_gpu
from benchmarks.gpu.on_gpu import Row
from engine.attention.comm import Exchange, RingComm
from engine.cluster.communicators import communicators
from engine.cluster.mesh import Mesh
from engine.cluster.nccl import OF_ONE_GPU, ONE_GPU
from engine.config.load import load
from engine.control.control import Control
from engine.parallel import groups as joining
from engine.run.cause import Cause
from engine.run.flight_recorder import first_mismatch
from engine.run.folder import RunFolder
from engine.run.metrics import read_metrics
from engine.trainer.rank import explain

ROOT = Path(__file__).parents[2]
PREPARED = ROOT / "prepared" / "nccl" / "libnccl.so.2"  # a newer NCCL than that of PyTorch
# hdp, tp, pp, ep. All of a world of at most eight ranks in which another kind of group is made.
MESHES = (
    *((2, 1, 1, 1), (4, 1, 1, 1), (1, 2, 1, 1), (2, 2, 1, 1), (1, 1, 2, 1), (2, 1, 2, 1), (1, 1, 3, 1), (1, 1, 4, 1)),
    *((2, 1, 3, 1), (1, 2, 3, 1), (2, 2, 2, 1), (2, 1, 4, 1), (1, 2, 4, 1), (2, 1, 1, 2), (4, 1, 1, 2), (4, 1, 1, 4)),
)
FEW = ((2, 2, 1, 1), (1, 1, 3, 1), (4, 1, 1, 2))  # in a dry run
START_S = 120.0  # for processes to import torch
MESH_S = 25.0  # after which a mesh hangs
LEFT_OUT = (1, 1, 4, 1)
DENSE = ("model=tiny", "model.layers=4", "model.kv_heads=2", "dtype=fp32", "context=256", "batch_tokens=1K")
EXPERTS = (*DENSE, "model.family=mixtral", "model.experts=4", "model.top_k=2")
# Ranks, whether the model has experts, and keys. A sequence of 256 tokens needs a ring of four ranks with capacity 64.
CASES: dict[str, tuple[int, bool, tuple[str, ...]]] = {
    "rings of 4, ZeRO-1": (4, False, ("capacity=64", "offload.ratio=0")),
    "rings of 4, ZeRO-3": (4, False, ("capacity=64", "offload.ratio=0", "zero.stage=3")),
    "optimizer on the host": (4, False, ("capacity=64", "optimizer.on_host=true")),
    "tp 2": (4, False, ("capacity=128", "parallel.tp=2")),
    "pp 2": (4, False, ("capacity=128", "parallel.pp=2")),
    "pp 4": (4, False, ("capacity=256", "parallel.pp=4", "model.tied=true")),
    "ep 2": (2, True, ("capacity=128", "parallel.ep=2")),
}
REFERENCES = {  # by what changes the model
    "dense": ("capacity=256",),
    "tied": ("capacity=256", "model.tied=true"),
    "experts": ("capacity=256",),
}
STEPS = 4
TOLERANCE = 1e-4  # of a loss in fp32, between kernels of a GPU and of a CPU
AT_ONCE = 4  # runs


def main() -> None:
    """Run the selected sections, and print their results."""
    options = on_gpu.parse_options(__doc__, tuple(SECTIONS))
    os.environ[ONE_GPU] = "1"
    for name, value in OF_ONE_GPU.items():
        os.environ.setdefault(name, value)
    if PREPARED.exists() and not options.dry_run:
        os.environ.setdefault("LD_PRELOAD", str(PREPARED))  # of all ranks, not of this process
    rows: list[Row] = []
    # Groups alone, as their memory is measured; then what starts runs, most of whose time is for imports.
    for sections in ([options.only],) if options.only else (["groups"], ["training", "faults"]):
        for row in rows_of(sections, options.dry_run):
            rows.append(row)
            print(json.dumps(row), flush=True)
            on_gpu.write(options.json, on_gpu.device_of(options), rows=rows)
    on_gpu.leave(rows, options.dry_run)


def rows_of(sections: Sequence[str], dry_run: bool) -> Iterator[Row]:
    """Yield the rows of sections as they come; they run at once, but one after another in a dry run, on few cores."""
    found = SimpleQueue[Row]()

    def work(section: str) -> None:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            for row in SECTIONS[section](Path(folder), dry_run):
                found.put({"section": section} | row)

    with ThreadPoolExecutor(1 if dry_run else len(sections)) as pool:
        running = {pool.submit(work, section) for section in sections}
        while running:
            ended, running = wait(running, timeout=0.1)
            while not found.empty():
                yield found.get()
            for one in ended:
                one.result()


def meshes(folder: Path, dry_run: bool) -> Iterator[Row]:
    """Let one world of processes join the groups of a mesh after the other; begin a new one after a mesh that hangs."""
    left = list(FEW if dry_run else MESHES)
    while left:
        world = _World(folder, left, "", dry_run)
        try:
            for mesh in left[:]:
                row = world.row(mesh)
                left.remove(mesh)
                yield row
                if "error" in row:
                    break
        finally:
            world.end()
    world = _World(folder, [LEFT_OUT], "left out", dry_run)
    try:
        row = world.row(LEFT_OUT)
    finally:
        world.end()
    hangs = str(row.pop("error", "")).startswith("hangs")
    yield row | {"case": "left out", "said": "hangs" if hangs else "ends", "target": "hangs", "holds": hangs}


class _World:
    """Processes that join the groups of meshes, each of as many of them as it has ranks."""

    def __init__(self, folder: Path, todo: Sequence[tuple[int, ...]], way: str, dry_run: bool) -> None:
        self._answers = Path(tempfile.mkdtemp(dir=folder))
        self._ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--rank", str(rank), str(self._answers), way, str(int(dry_run))],
                env={**os.environ, "LOCAL_RANK": str(rank)},
                stdin=subprocess.PIPE,
                text=True,
            )
            for rank in range(max(Mesh(*mesh).ranks for mesh in todo))
        ]
        for process in self._ranks:
            assert process.stdin is not None
            process.stdin.write(json.dumps(todo) + "\n")
            process.stdin.flush()
        last = time.monotonic() + START_S
        while len(list(self._answers.glob("ready.*"))) < len(self._ranks) and time.monotonic() < last:
            time.sleep(0.02)

    def row(self, sizes: tuple[int, ...]) -> Row:
        """Wait until all ranks of a mesh have said what they found; returns their row."""
        mesh, began = Mesh(*sizes), time.monotonic()
        name, row = "x".join(map(str, sizes)), dict[str, Any]()
        paths = [self._answers / f"{name}.{rank}" for rank in range(mesh.ranks)]
        while missing := [path for path in paths if not path.exists()]:
            gone = [process.poll() for process in self._ranks if process.poll()]
            if gone or time.monotonic() > began + MESH_S:
                why = f"a rank ended with code {gone[0]}" if gone else f"hangs: {len(missing)} ranks did not answer"
                return {"case": name, "ranks": mesh.ranks, "error": why}
            time.sleep(0.02)
        found = [json.loads(path.read_text()) for path in paths]
        row = {"case": name, "ranks": mesh.ranks, "seconds": round(max(one["seconds"] for one in found), 2)}
        row |= {"groups": len(found[0]["mib"]), "mib": found[0]["mib"], "nccl": found[0]["nccl"]}
        wrong = [rank for rank, one in enumerate(found) if not one["right"]]
        return row | ({"error": f"wrong sums or messages on ranks {wrong}"} if wrong else {"holds": True})

    def end(self) -> None:
        """End all processes, also those that hang."""
        for process in self._ranks:
            process.kill()
            process.wait()


def rank_main(rank: int, answers: Path, way: str, dry_run: bool) -> None:
    """Join the groups of each mesh that standard input names, use them, and write what was found."""
    device = torch.device("cpu") if dry_run else torch.device("cuda", 0)
    if not dry_run:
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
    (answers / f"ready.{rank}").touch()
    for number, sizes in enumerate(json.loads(sys.stdin.readline())):
        mesh = Mesh(*sizes)
        if rank < mesh.ranks:
            began, name = time.monotonic(), "x".join(map(str, sizes))
            store: Any = dist.FileStore(  # type: ignore[attr-defined]
                str(answers.parent / f"{answers.name}.{number}"), mesh.ranks
            )
            found = _join(mesh, rank, device, store, way)
            new = answers / f".{name}.{rank}"
            new.write_text(json.dumps(found | {"seconds": time.monotonic() - began}))
            new.rename(answers / f"{name}.{rank}")
    sys.stdin.read()  # until the parent ends: a rank that left would take the store of others with it


def _join(mesh: Mesh, rank: int, device: torch.device, store: Any, way: str) -> dict[str, Any]:
    """Make the groups of a mesh, and check a sum over each and an exchange of messages around the rings."""
    mib: dict[str, float] = {}

    def free() -> float:
        if device.type != "cuda":
            return 0.0
        torch.cuda.synchronize()
        return torch.cuda.mem_get_info(device)[0] / 2**20

    begin = free()
    joining.connect(device, store, rank, mesh.ranks)
    dist.all_reduce(torch.zeros(1, device=device))
    mib["default"] = round(begin - free(), 1)
    kinds, members = iter(list[str]()), list[tuple[Any, list[int]]]()
    make, listed = dist.new_group, communicators

    def new_group(ranks: list[int], *arguments: Any, **options: Any) -> Any:
        before = free()
        group = make(ranks, *arguments, **options)
        if options.get("backend") is None:
            dist.all_reduce(torch.zeros(1, device=device), group=group)
            mib[f"{next(kinds, 'alone')}[{len(ranks)}]"] = round(before - free(), 1)
            members.append((group, ranks))
        return group

    def chosen(mesh: Mesh, tied: bool) -> list[Any]:
        nonlocal kinds
        found = listed(mesh, tied)
        if way == "left out" and 0 < mesh.place(rank).pp < mesh.pp - 1:
            found = found[:-1]
        kinds = iter([one.group for one in found])
        return found

    overrides = [f"parallel.{name}={size}" for name, size in vars(mesh).items() if name != "hdp"]
    base = EXPERTS if mesh.ep > 1 else DENSE
    config = load(["model.tied=true", *base, *overrides, f"cluster.ranks_per_node={mesh.ranks}", "capacity=256"])
    with patch.object(dist, "new_group", new_group), patch.object(joining, "communicators", chosen):
        found = joining.create_groups(config, Control(rank), device, rank)
    right = True
    for group, ranks in [(None, list(range(mesh.ranks))), *members]:
        one = torch.tensor([float(rank)], device=device)
        dist.all_reduce(one, group=group)
        right &= one.item() == sum(ranks)
    if mesh.hdp > 1:
        here, at = mesh.members(rank, "hdp"), found.hdp_rank
        sent, got = torch.full((1024,), float(rank), device=device), torch.zeros(1024, device=device)
        RingComm(found.rings).post([Exchange(sent, (at + 1) % mesh.hdp, got, (at - 1) % mesh.hdp)]).wait()
        right &= got.tolist() == [float(here[at - 1])] * 1024
    dist.destroy_process_group()
    nccl = "" if device.type == "cpu" else ".".join(map(str, torch.cuda.nccl.version()))
    return {"mib": mib, "right": right, "nccl": nccl}


def training(folder: Path, dry_run: bool) -> Iterator[Row]:
    """Train in each case, and compare the losses with those of one CPU process."""
    _write_text(folder)
    steps = 2 if dry_run else STEPS
    with ThreadPoolExecutor(2 if dry_run else AT_ONCE) as pool:
        alone = {
            name: pool.submit(_train, folder / name, folder, steps, 1, name == "experts", keys, True)
            for name, keys in REFERENCES.items()
        }
        runs = {
            name: pool.submit(_train, folder / name.replace(" ", "_"), folder, steps, ranks, experts, keys, dry_run)
            for name, (ranks, experts, keys) in CASES.items()
        }
        for name, run in runs.items():
            row = {"case": name, "ranks": CASES[name][0]}
            try:
                kind = "experts" if CASES[name][1] else "tied" if "model.tied=true" in CASES[name][2] else "dense"
                yield row | _compared(run.result(), alone[kind].result(), steps)
            except Exception as error:
                yield on_gpu.failed(row, error)


def faults(folder: Path, dry_run: bool) -> Iterator[Row]:
    """Cause errors of CUDA in processes of their own, then harm rank 1 of a run in its second step."""
    for case in ERRORS:
        yield _failing(case, dry_run)
    _write_text(folder)
    steps = 3 if dry_run else STEPS
    base = ("capacity=128", "run.chaos=true", "run.checkpoint_every=1")
    reference: Losses | None = None
    for case, (at, keys, found_of) in FAULTS.items():
        row: Row = {"case": case, "ranks": 2}
        try:
            reference = reference or _train(folder / "alone", folder, steps, 1, False, REFERENCES["dense"], True)
            out = folder / case
            train = partial(_train, out, folder, steps, 2, False, (*base, *keys), dry_run)
            with ThreadPoolExecutor(1) as pool:
                run = pool.submit(train)
                while not (out / "metrics.jsonl").exists() and not run.done():
                    time.sleep(0.05)
                if not run.done():
                    _bytescale("chaos", str(out), case, "--rank", "1", "--step", "2", "--at", at)
                wait([run])
            done, found = found_of(RunFolder(out), run, train, dry_run)
            row |= _compared(done, reference, steps) | found
            yield row | {"holds": row["holds"] and found.get("holds", True)}
        except Exception as error:
            yield on_gpu.failed(row, error)


class Losses(NamedTuple):
    """The loss of each step of a run, the seconds that it took, and its lines with the seconds at which they came."""

    losses: list[float]
    seconds: float
    lines: list[tuple[float, str]]


Found = tuple[Losses, Row]  # of a run and its restart; what was noticed


def _restarted(folder: RunFolder, run: Future[Losses], train: Callable[[], Losses], dry_run: bool) -> Found:
    """The run has restarted by itself. `noticed_s` are seconds from the end of the first step to the line about it."""
    done = run.result()
    lines = [(at, line) for at, line in done.lines if "restart 1 of" in line]
    first = next((at for at, line in done.lines if line.startswith("step 1/")), done.seconds)
    return done, {"said": lines[0][1], "noticed_s": round(lines[0][0] - first, 1)} if lines else {"holds": False}


def _recorded(folder: RunFolder, run: Future[Losses], train: Callable[[], Losses], dry_run: bool) -> Found:
    """The run has ended, as it may not restart: what it says, and the records of NCCL; then it is resumed.

    The message and the report must name the operation that cannot end. gloo writes no records, so in a dry run one is
    written here.
    """
    said = str(run.exception())
    if dry_run:
        _write_record(folder.nccl_record(0))
    records = sorted(path.name for path in folder.logs.glob("nccl-rank-*"))
    named = first_mismatch(folder, 2)
    _bytescale("report", str(folder.root))
    reported = named is not None and "could not end" in (folder.root / "report.html").read_text(encoding="utf-8")
    in_message = dry_run or (named is not None and named in said)
    found = {"said": said, "records": records, "named": named, "reported": reported}
    return train(), found | {"holds": "was stopped by a signal" in said and in_message and reported}


def _write_record(path: Path) -> None:
    """Write the record of a rank that waits for another one, as PyTorch makes it; gloo's lacks the ranks of a group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        dist.all_reduce(torch.zeros(8))
        record = pickle.loads(_dump_fr_trace())
    finally:
        dist.destroy_process_group()
    group = record["entries"][-1]["process_group"][0]
    path.write_bytes(pickle.dumps(record | {"pg_config": {group: {"ranks": "[0, 1]"}}}))


FAULTS: dict[str, tuple[str, tuple[str, ...], Callable[..., Found]]] = {  # phase, keys, what is then looked at
    "kill-rank": ("plan", (), _restarted),
    "stop-rank": ("backward", ("run.restarts=0",), _recorded),
}


def _failing(case: str, dry_run: bool) -> Row:
    """Cause an error of CUDA in a new process: is it taken for a failed GPU only if it says so?"""
    row: Row = {"case": case}
    try:
        command = [sys.executable, __file__, "--fail", case, str(int(dry_run))]
        done = subprocess.run(command, env={**os.environ, "RANK": "1"}, capture_output=True, text=True, timeout=START_S)
        cause = Cause.of_json(json.loads(done.stdout.splitlines()[-1]))
        row |= {"said": cause.problem.message, "code": cause.code, "hardware": cause.hardware}
        where = socket.gethostname() in cause.problem.message
        expected = ERRORS[case].hardware
        target = "the GPU of this host has failed" if expected else "an error of the program"
        return row | {"target": target, "holds": (cause.hardware, where) == (expected, expected)}
    except Exception as error:
        return on_gpu.failed(row, error)


class CudaError(NamedTuple):
    """An error of CUDA: how it is caused on a GPU, what PyTorch says, and whether it means that the GPU has failed."""

    cause: Callable[[], object]
    text: str
    hardware: bool


def _trap() -> None:
    """Run an instruction that ends the kernel, as Xid 79 and bugs of kernels do."""
    kernel = torch.cuda._compile_kernel('extern "C" __global__ void fail() { __trap(); }', "fail")
    kernel((1, 1, 1), (1, 1, 1), ())


def _index() -> object:
    """Read behind the end of a tensor."""
    device = torch.device("cuda", 0)
    return torch.zeros(4, device=device)[torch.tensor([9], device=device)]


ERRORS = {
    "a kernel that traps": CudaError(_trap, "CUDA error: unspecified launch failure", True),
    "an index out of bounds": CudaError(_index, "CUDA error: device-side assert triggered", False),
}


def fail_main(case: str, dry_run: bool) -> None:
    """Cause an error, and print how a rank explains it, as the last line."""
    try:
        if dry_run:
            raise torch.AcceleratorError(ERRORS[case].text)
        ERRORS[case].cause()
        torch.cuda.synchronize()
    except Exception as error:
        print(json.dumps(explain(error).to_json()))


def _write_text(folder: Path) -> None:
    (folder / "text").mkdir(exist_ok=True)
    words = ["ring", "rank", "stage", "expert", "group", "step", "token", "plan"]
    for number in range(40):
        text = " ".join(words[(number * 7 + place * (3 + number % 5)) % len(words)] for place in range(40 + 9 * number))
        (folder / "text" / f"{number:02}.txt").write_text(text, encoding="utf-8")


def _train(out: Path, folder: Path, steps: int, ranks: int, experts: bool, keys: Sequence[str], cpu: bool) -> Losses:
    cluster = "local" if cpu else "h200x8"
    base = [f"cluster={cluster}", *(EXPERTS if experts else DENSE), f"data.path={folder / 'text'}", f"run.out={out}"]
    more = [f"run.steps={steps}", f"cluster.ranks_per_node={ranks}", "run.validate_every=1000"]
    lines = _bytescale("train", *base, *more, *keys)
    found = {line["step"]: line["loss"] for line in read_metrics(out / "metrics.jsonl")}
    return Losses([found[step] for step in sorted(found)], lines[-1][0], lines)


def _bytescale(*arguments: str) -> list[tuple[float, str]]:
    """Run a command of ours; return its lines. Raises RuntimeError with its message if it fails."""
    command, began = [sys.executable, "-m", "bytescale_cli", *arguments, "--json"], time.monotonic()
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        lines = list[tuple[float, str]]()
        for line in process.stderr:
            lines.append((time.monotonic() - began, line.strip()))
            print(line, end="", file=sys.stderr)
        answer = json.loads(process.stdout.read())
    if not answer["ok"]:
        raise RuntimeError(f"{answer['error']['key']}: {answer['error']['message']}")
    return [*lines, (time.monotonic() - began, "")]


def _compared(run: Losses, alone: Losses, steps: int) -> Row:
    apart = max((abs(a / b - 1) for a, b in zip(run.losses, alone.losses, strict=False)), default=1.0)
    holds = len(run.losses) == len(alone.losses) == steps and apart <= TOLERANCE
    row = {"losses": run.losses, "cpu": alone.losses, "apart": apart, "seconds": round(run.seconds, 1)}
    return row | {"said": f"{apart:.0e} from the CPU", "target": f"{steps} steps within {TOLERANCE}", "holds": holds}


SECTIONS = {"groups": meshes, "training": training, "faults": faults}


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the processes of a world, as after Ctrl-C
    with suppress(KeyboardInterrupt):
        if "--rank" in sys.argv:
            place, answers_of, way_of, dry = sys.argv[2:]
            rank_main(int(place), Path(answers_of), way_of, dry == "1")
        elif "--fail" in sys.argv:
            fail_main(sys.argv[2], sys.argv[3] == "1")
        else:
            main()
