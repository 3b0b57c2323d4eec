from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config.load import load
from engine.data import ledger as module
from engine.data.corpus import Corpus
from engine.data.ledger import ROW, SHARD, Ledger
from engine.data.sequences import SequenceTable
from engine.data.steps import Cursor, Steps
from engine.errors import DataError, ExitCode
from engine.files import append
from engine.job import Job
from engine.planner.make import plan_step
from engine.trainer.rank import explain
from engine.units import Ints
from tests.data.resuming import resumes_exactly
from tests.planner.samples import by_hand, ints
from tests.refusals import refused


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of three steps, which are not synced: that takes longer than all else."""
    monkeypatch.setattr(module, "STEPS", 3)
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def table_of(step: int, hashes: dict[tuple[int, int, int], int] | None = None) -> SequenceTable:
    """A step of one to four sequences, the first two of one document; `hashes` has documents with other contents."""
    random = np.random.default_rng(step)
    count = int(random.integers(1, 5))
    source, block, document = (random.integers(0, most, count) for most in (2, 5, 9))
    source[:2], block[:2], document[:2] = source[0], block[0], document[0]
    start, length = random.integers(0, 9, count) << 32, random.integers(1, 99, count)
    content = random.integers(0, 2**64, count, dtype=np.uint64)
    content[:2] = content[0]
    for at, place in enumerate(zip(source.tolist(), block.tolist(), document.tolist(), strict=True)):
        content[at] = (hashes or {}).get(place, content[at])
    return SequenceTable(source, block, document, start, length, length // 2, content)


def plan_of(step: int) -> Any:
    """What the ledger takes of a plan: rings of one to three ranks."""
    random = np.random.default_rng(1000 + step)
    degrees = random.integers(1, 4, len(table_of(step)))
    ranks = np.concatenate([random.permutation(4)[:degree] for degree in degrees])
    return of_whole_sequences(ranks, np.repeat(np.arange(len(degrees)), degrees))


def of_whole_sequences(ranks: Ints, sequence: Ints) -> SimpleNamespace:
    """Return what the ledger takes of a plan without slices: the rank and the sequence of each shard."""
    every = np.arange(int(sequence.max()) + 1)
    return SimpleNamespace(ring_ranks=ranks, shard_slice=sequence, slice_sequence=every, before=0 * every)


def record(ledger: Ledger, step: int, **changes: Any) -> None:
    ledger.record(step, table_of(step, **changes), plan_of(step))


def opened(folder: Path, **limits: Any) -> Ledger:
    return Ledger(folder, ["web", "code"], **limits)


def assert_has(ledger: Ledger, steps: range) -> None:
    """It has these steps, as they were recorded, and no other."""
    for step in range(1, steps.stop + 9):
        rows, shards, table = ledger.documents(step), ledger.shards(step), table_of(step)
        if step not in steps:
            assert not len(rows) and not len(shards)
            continue
        for name in set(ROW.names or ()) - {"step"}:
            assert rows[name].tolist() == getattr(table, name).tolist()
        assert set(rows["step"].tolist()) == set(shards["step"].tolist()) == {step}
        assert shards["rank"].tolist() == plan_of(step).ring_ranks.tolist()
        assert shards["sequence"].tolist() == plan_of(step).shard_slice.tolist()
    found = [(rows["step"].tolist(), shards["step"].tolist()) for rows, shards in ledger.parts()]
    assert all({*rows} == {*shards} for rows, shards in found)
    assert sorted({*chain.from_iterable(rows for rows, _ in found)}) == list(steps)
    assert ledger.first == (steps[0] if steps else None)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_ledger_that_was_never_written_has_no_steps(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger")
    assert ledger.sources == [] and ledger.first is None
    assert_has(ledger, range(1, 1))


class Recorded:
    """The files of a ledger after each step. A run that resumes was killed while it recorded its last step.

    Of that step a row is cut short, or a file ends in zeros after a power loss; it had no checkpoint.
    """

    def __init__(self, folder: Path, damages: Iterator[tuple[str, int]], state: int | None) -> None:
        damage, size = next(damages)
        last = max((int(rows["step"][-1]) for rows, _ in Ledger(folder).parts()), default=0)
        assert_has(Ledger(folder), range(1, last + 1))
        if damage != "nothing" and last > (state or 0):
            if size % 2 == 0:  # sequences are on disk before shards are written
                shards = sorted(folder.glob("ranks-*"))[-1]
                shards.write_bytes(shards.read_bytes()[: -len(plan_of(last).ring_ranks) * SHARD.itemsize])
            path = sorted(folder.glob(["documents-*", "ranks-*"][size % 2]))[-1]
            kept = path.read_bytes()[: -1 - size % (ROW if size % 2 == 0 else SHARD).itemsize]
            path.write_bytes(kept if damage == "cut" else kept + bytes(size))
        self._folder, self._ledger, self._step = folder, opened(folder), state or 0

    def state(self) -> int:
        return self._step

    def take(self) -> dict[str, bytes]:
        self._step += 1
        record(self._ledger, self._step)
        return {name: text for name, text in contents(self._folder).items() if name != "replaced.bin"}


@given(
    most=st.integers(1, 8),
    ahead=st.integers(0, 4),
    damages=st.lists(st.tuples(st.sampled_from(["nothing", "cut", "zeros"]), st.integers(0, 99)), min_size=1),
)
@settings(max_examples=15)
def test_it_follows_the_run_when_it_goes_back(
    tmp_path_factory: pytest.TempPathFactory, most: int, ahead: int, damages: list[tuple[str, int]]
) -> None:
    """Its files are those of a run that was never killed, after each step."""
    folder, repeated = tmp_path_factory.mktemp("runs") / "ledger", cycle(damages)
    resumes_exactly(lambda state: Recorded(folder, repeated, state), most, ahead)
    assert not (folder / "replaced.bin").exists()


def test_another_process_reads_complete_steps_meanwhile(tmp_path: Path) -> None:
    """At any time the file being written may end anywhere: all steps before are there, and nothing fails."""
    ledger = opened(tmp_path)
    for step in (4, 5):
        record(ledger, step)
    before = contents(tmp_path)
    record(ledger, 6)
    after, reader = contents(tmp_path), Ledger(tmp_path)
    (tmp_path / "hashes-00000001.bin").write_bytes(before["hashes-00000001.bin"])  # written last
    for name in ("documents-00000001.bin", "ranks-00000001.bin"):
        for size in range(len(before[name]), len(after[name])):
            (tmp_path / name).write_bytes(after[name][:size])
            assert len(reader.documents(4)) == len(table_of(4)) and len(reader.documents(5)) == len(table_of(5))
            assert len(reader.shards(5)) == len(plan_of(5).ring_ranks) and len(reader.documents(6)) <= len(table_of(6))
            assert [step for rows, _ in reader.parts() for step in rows["step"].tolist() if step not in (4, 5, 6)] == []


def changed(step: int) -> dict[tuple[int, int, int], int]:
    """Another content for the last document of a step."""
    table = table_of(step)
    return {(int(table.source[-1]), int(table.block[-1]), int(table.document[-1])): 1}


@pytest.mark.parametrize("step", [4, 5, 9, 10])
def test_a_document_that_has_changed_is_refused_when_its_step_is_run_again(step: int, tmp_path: Path) -> None:
    """Not only in the first step that is run again. The message has its ID; the ledger stays as it is."""
    ledger = opened(tmp_path / "ledger")
    for number in range(1, 11):
        record(ledger, number)
    ledger = opened(tmp_path / "ledger")
    for number in range(4, step):
        record(ledger, number)
    before = contents(tmp_path / "ledger")
    with refused(DataError, f"{tmp_path}/ledger") as problems:
        record(ledger, step, hashes=changed(step))
    assert f"step {step}" in problems[0].message
    ((source, block, number),) = changed(step)
    document = f"{('web', 'code')[source]}:{block}:{number}"
    (problem,) = problems
    assert f"document {document} " in problem.message
    assert f"bytescale data trace {tmp_path} --document {document}" in str(problem.hint)
    assert "--resume never" in str(problem.hint)
    after = contents(tmp_path / "ledger")
    assert {name: after[name] for name in before if name != "replaced.bin"} == {
        name: text for name, text in before.items() if name != "replaced.bin"
    }
    assert_has(Ledger(tmp_path / "ledger"), range(1, 11) if step == 4 else range(1, step))


def test_steps_are_compared_though_the_run_was_killed_again_before_it_reached_them(tmp_path: Path) -> None:
    ledger = opened(tmp_path)
    for step in range(1, 11):
        record(ledger, step)
    for first, last in ((4, 6), (2, 5), (5, 8)):  # goes back to the step before `first`, is killed after `last`
        ledger = opened(tmp_path)
        for step in range(first, last + 1):
            record(ledger, step)
    ledger = opened(tmp_path)
    for step in (9, 10):
        with refused(DataError, tmp_path) as problems:
            record(ledger, step, hashes=changed(step))
        assert f"step {step}" in problems[0].message
        record(ledger, step)
    record(ledger, 11, hashes=changed(11))
    assert not (tmp_path / "replaced.bin").exists()


def test_other_documents_in_a_step_that_is_run_again_are_not_refused(tmp_path: Path) -> None:
    """For example after a change of batch_tokens."""
    record(opened(tmp_path), 1)
    other = table_of(2)
    other.block[:] += 100
    ledger = opened(tmp_path)
    ledger.record(1, other, plan_of(2))
    assert ledger.documents(1)["block"].tolist() == other.block.tolist()


def test_sources_keep_their_numbers_when_others_are_added_or_left_out(tmp_path: Path) -> None:
    zeros = np.zeros(1, dtype=np.int64)
    table = SequenceTable(zeros, zeros, zeros, zeros, zeros + 1, zeros + 1, zeros.astype(np.uint64))
    plan: Any = of_whole_sequences(zeros, zeros)
    for step, names in enumerate((["web", "code"], ["code"], ["books", "code"], ["web"]), start=1):
        Ledger(tmp_path, names).record(step, table, plan)
    ledger = Ledger(tmp_path)
    assert [ledger.sources[int(ledger.documents(step)["source"][0])] for step in (1, 2, 3, 4)] == [
        "web",
        "code",
        "books",
        "web",
    ]


def test_the_oldest_files_are_removed_when_all_but_the_last_exceed_the_limit(tmp_path: Path) -> None:
    ledger = opened(tmp_path, limit=1)
    for step in range(1, 12):
        record(ledger, step)
    assert_has(ledger, range(10, 12))
    everything = sum(len(text) for text in contents(tmp_path).values())
    ledger = opened(tmp_path, limit=10 * everything)
    for step in range(12, 17):
        record(ledger, step)
    assert_has(ledger, range(10, 17))
    ledger = opened(tmp_path)  # goes back to before the oldest file
    record(ledger, 2)
    assert_has(ledger, range(2, 3))


@pytest.mark.parametrize("kind", ["documents", "ranks"])
def test_a_full_disk_is_a_storage_error_of_the_rank(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(opened(tmp_path), 1)
    full = partial(Path("/dev/full").open, "ab")
    monkeypatch.setattr(module, "append", lambda path: full() if path.name.startswith(kind) else append(path))
    ledger = opened(tmp_path)
    ledger._last = 1  # the file is not to be read
    ledger._numbers = np.arange(2)
    with pytest.raises(OSError) as caught:
        record(ledger, 2)
    assert caught.value.errno == errno.ENOSPC
    assert explain(caught.value).code == ExitCode.STORAGE


def recorded(corpora: list[Corpus], folder: Path, ranks: int) -> dict[str, bytes]:
    """The files of sequences after 20 steps on some ranks."""
    config = load(["recipe=quickstart", f"cluster.ranks_per_node={ranks}", "context=16", "batch_tokens=64"])
    settings, steps, cursor, ledger = (
        Job(config).settings,
        Steps(corpora, config),
        Cursor(),
        Ledger(folder, ["data"]),
    )
    for step in range(1, 21):
        found = steps.next(cursor)
        assert found is not None
        table, cursor = found
        ledger.record(step, table, plan_step(table.length, settings))
    return {name: text for name, text in contents(folder).items() if name.startswith("documents")}


def test_the_files_of_sequences_are_the_same_for_any_number_of_ranks(
    make_corpus: Callable[..., Corpus], tmp_path: Path
) -> None:
    corpora = [make_corpus(np.random.default_rng(1).integers(1, 60, 90).tolist())]
    expected = recorded(corpora, tmp_path / "1", 1)
    assert len(expected) == 7 and sum(map(len, expected.values())) > 60 * ROW.itemsize
    for ranks in (2, 3, 4, 8):
        assert recorded(corpora, tmp_path / str(ranks), ranks) == expected


def test_shards_name_the_ranks_of_rings(make_corpus: Callable[..., Corpus], tmp_path: Path) -> None:
    """A document that needs all four ranks is on all of them."""
    config = load(["recipe=quickstart", "cluster.ranks_per_node=4", "context=64", "capacity=16", "batch_tokens=64"])
    found = Steps([make_corpus([64, 3])], config).next(Cursor())
    assert found is not None
    plan = plan_step(found[0].length, Job(config).settings)
    ledger = Ledger(tmp_path, ["data"])
    ledger.record(1, found[0], plan)
    (long,) = np.flatnonzero(ledger.documents(1)["length"] == 64).tolist() or [None]
    shards = ledger.shards(1)
    assert sorted(shards["rank"][shards["sequence"] == long].tolist()) == [0, 1, 2, 3]


def test_the_shards_of_a_sliced_sequence_are_listed_once(tmp_path: Path) -> None:
    """All slices of a sequence have the same ring."""
    plan = replace(
        by_hand([3, 5, 4, 9], [(1, 0)] * 3 + [(2,)], [[[0], [1], [2]], [[0], [1], [2]], [[3]]]), before=ints(0, 3, 8, 0)
    )
    one = np.arange(2, dtype=np.int64)
    table = SequenceTable(0 * one, 0 * one, one, 0 * one, ints(12, 9), ints(12, 9), one.astype(np.uint64))
    ledger = Ledger(tmp_path, ["web"])
    ledger.record(1, table, plan)
    assert ledger.shards(1)[["sequence", "rank"]].tolist() == [(0, 1), (0, 0), (1, 2)]


@pytest.mark.parametrize("kind", ["documents", "ranks"])
def test_a_flipped_bit_is_found_in_its_step_and_no_other(kind: str, tmp_path: Path) -> None:
    ledger = opened(tmp_path)
    for step in range(1, 8):
        record(ledger, step)
    assert ledger.damaged() == []
    path, row = tmp_path / f"{kind}-00000001.bin", ROW if kind == "documents" else SHARD
    content = bytearray(path.read_bytes())
    steps = np.frombuffer(bytes(content), dtype=row)["step"]
    content[int(np.searchsorted(steps, 5)) * row.itemsize + row.itemsize - 1] ^= 4  # of the last field of the first row
    path.write_bytes(content)
    reader = Ledger(tmp_path)
    assert reader.damaged() == [f"{path.name}: step 5 does not match its hash"]
    read = reader.documents if kind == "documents" else reader.shards
    with pytest.raises(DataError, match="is damaged: step 5 does not match its hash") as caught:
        read(5)
    assert caught.value.problems[0].key == str(path) and caught.value.code == ExitCode.DATA
    assert len(read(4)) and len(read(6))
    for step in (4, 5):
        record(ledger := opened(tmp_path) if step == 4 else ledger, step)  # the damage says nothing about documents
    assert ledger.damaged() == []


def test_rows_that_are_cut_off_are_damage_and_those_without_hashes_are_not_checked(tmp_path: Path) -> None:
    """Ledgers of earlier versions have no hashes, and after a power loss the last steps may have none."""
    ledger = opened(tmp_path)
    for step in range(1, 4):
        record(ledger, step)
    path = tmp_path / "documents-00000000.bin"
    path.write_bytes(path.read_bytes()[:-1])
    assert Ledger(tmp_path).damaged() == [f"{path.name}: step 3 does not match its hash"]
    hashes = tmp_path / "hashes-00000000.bin"
    hashes.write_bytes(hashes.read_bytes()[:-20] + bytes(30))
    assert Ledger(tmp_path).damaged() == []
    hashes.unlink()
    assert Ledger(tmp_path).damaged() == [] and len(Ledger(tmp_path).documents(1)) == len(table_of(1))
    record(opened(tmp_path), 4)
    assert len(Ledger(tmp_path).documents(4)) == len(table_of(4))


@pytest.mark.parametrize("number", [99, 0, -1, "two", None])
def test_a_ledger_of_a_newer_format_or_one_that_never_was_is_refused(number: object, tmp_path: Path) -> None:
    """Whatever is read or written: its rows may mean something else."""
    record(opened(tmp_path), 1)
    path = tmp_path / "sources.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": number}))
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    for read in (
        lambda: Ledger(tmp_path).documents(1),
        lambda: Ledger(tmp_path).shards(1),
        lambda: Ledger(tmp_path).damaged(),
        lambda: list(Ledger(tmp_path).parts()),
        lambda: record(opened(tmp_path), 2),
    ):
        with pytest.raises(DataError) as caught:
            read()
        (problem,) = caught.value.problems
        assert problem.key == str(path) and str(number) in problem.message and problem.hint
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


@pytest.mark.parametrize("text", ["", "[1]", "{}", "\0", '{"format": 2, "sources": "web"}'])
def test_damaged_names_of_sources_are_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "sources.json").write_text(text)
    with pytest.raises(DataError, match=r"is damaged|is not JSON") as caught:
        _ = Ledger(tmp_path).sources
    assert str(caught.value.problems[0].key).startswith(str(tmp_path / "sources.json"))
