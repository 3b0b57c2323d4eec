"""What was prepared is read instead of planned, and what was packed arrives whole."""

from __future__ import annotations

import struct
from pathlib import Path
from zipfile import ZipFile

import pytest

from benchmarks.gpu import first_hour, one_rank_1m, plans, prepared, train
from engine.config.load import load

pytestmark = pytest.mark.long


def test_prepared_steps_need_no_planner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "FOLDER", tmp_path)
    config = train.config_of(*train.TINY[0])
    drawn, steps = train.steps_of(config, write=True)
    modelled = one_rank_1m.modelled_step("qwen3-8b-1m-1node", write=True)
    for module in (plans, one_rank_1m):
        monkeypatch.setattr(module, "plan_step", lambda *arguments: 1 / 0)
    assert train.steps_of(config) == (drawn, steps)
    assert one_rank_1m.modelled_step("qwen3-8b-1m-1node") == modelled
    with pytest.raises(ZeroDivisionError):
        plans.planned(drawn, train.STEPS + 1)


def test_another_config_has_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "FOLDER", tmp_path)
    one, other = load(["recipe=quickstart"]), load(["recipe=quickstart", "run.seed=2"])
    assert prepared.prepared(one, "x", lambda: 1, write=True) == 1
    assert [prepared.prepared(config, "x", lambda: 2) for config in (one, other)] == [1, 2]
    assert prepared.prepared(one, "y", lambda: 3) == 3


def entry(kind: int, capability: int, code: bytes) -> bytes:
    """One program of a fat binary, with a header of 64 bytes."""
    return struct.pack("<HHIQIIII", kind, 0x101, 64, len(code), len(code), 0, 0, capability).ljust(64, b"\0") + code


def library(*fat_binaries: bytes) -> bytes:
    """An ELF file with fat binaries, and with debug information in its second section."""
    debug, names = b"D" * 32, b"\0.debug_info\0.names\0"
    content = b"".join(struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(one)) + one for one in fat_binaries)
    start = 64 + len(content)
    sections = [(0, 0), (1, len(debug)), (13, len(names))]
    at, headers = start, b""
    for name, size in sections:
        headers += struct.pack("<IIQQQQ", name, 0, 0, 0, at, size).ljust(64, b"\0")
        at += size
    header = b"\x7fELF".ljust(40, b"\0") + struct.pack("<Q", at).ljust(20, b"\0") + struct.pack("<HH", len(sections), 2)
    return header + content + debug + names + headers


def test_a_library_keeps_its_code_for_hopper_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the same addresses: what refers to a fat binary, or follows it, is left where it is."""
    ours, blackwell = entry(2, 90, b"H" * 40), entry(2, 100, b"B" * 24)
    both = entry(2, 80, b"A" * 16) + ours + entry(1, 90, b"P" * 8) + blackwell
    before = library(both, blackwell)
    after = prepared.only_hopper(before)
    assert len(after) == len(before) and struct.unpack_from("<Q", after, 72) == (len(ours),)
    assert after[80 : 80 + len(both)] == ours.ljust(len(both), b"\0")
    rest, debug = 80 + len(both), 80 + len(both) + 16 + len(blackwell)
    assert after[rest:debug] == before[rest:debug], "it has no code for Hopper, and is not for it"
    assert after[debug:] == bytes(32) + before[debug + 32 :]

    monkeypatch.setattr(prepared, "FOLDER", tmp_path / "prepared")
    monkeypatch.setattr(first_hour, "ROOT", tmp_path)
    with ZipFile(tmp_path / "nccl.whl", "w") as wheel:
        wheel.writestr("nvidia/nccl/lib/libnccl.so.2", before)
    prepared.pack_nccl(tmp_path / "nccl.whl")
    first_hour.unpack()
    assert (tmp_path / "prepared" / "nccl" / "libnccl.so.2").read_bytes() == after


def test_a_large_wheel_is_installed_when_all_its_pieces_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prepared, "FOLDER", tmp_path / "prepared")
    monkeypatch.setattr(prepared, "PIECE_BYTES", 100)
    monkeypatch.setattr(first_hour, "ROOT", tmp_path)
    installed = list[str]()
    monkeypatch.setattr(first_hour, "install", installed.append)
    with ZipFile(tmp_path / "a.whl", "w") as wheel:
        wheel.writestr("a.so", bytes(range(256)))
    prepared.pack_large(tmp_path / "a.whl")
    second = tmp_path / "prepared" / "large-2"
    second.rename(tmp_path / "elsewhere")
    first_hour.unpack()
    assert not installed and "a.whl" in capsys.readouterr().err
    (tmp_path / "elsewhere").rename(second)
    first_hour.unpack()
    first_hour.unpack()
    assert installed == ["large"]
    with ZipFile(tmp_path / "prepared" / "large" / "a.whl") as wheel:
        assert wheel.read("a.so") == bytes(range(256))
