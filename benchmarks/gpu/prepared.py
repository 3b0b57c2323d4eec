"""What benchmarks on a GPU need, made before and carried there, so that nothing is planned or fetched there.

    python benchmarks/gpu/prepared.py [--nccl WHEEL] [--large WHEEL]

writes to folders in prepared/, which git ignores; `first_hour.py` unpacks and installs what is there:

    plans      the plans of its parts, so that the planner is not compiled
    wheels     wheels of packages that the GPU's machine lacks. Download them there
    nccl       the library of the package nvidia-nccl-cu13, with machine code for Hopper alone: 29 MiB instead of 206
    large-N    a wheel that is too large to be carried, compressed better and in pieces, one in each folder
"""

from __future__ import annotations

import argparse
import hashlib
import io
import lzma
import pickle
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar
from zipfile import ZIP_STORED, ZipFile

sys.path.insert(0, str(Path(__file__).parents[2]))

from engine.config.schema import Config

FOLDER = Path(__file__).parents[2] / "prepared"
PIECE_BYTES = 40 * 2**20  # of a large wheel in each folder
_CUBIN, _HOPPER = 2, 90  # in the headers of a fat binary: machine code rather than PTX; compute capability 9.0
_FILTERS = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 1 << 26}]  # of machine code

T = TypeVar("T")


def prepared(config: Config, what: str, make: Callable[[], T], write: bool = False) -> T:
    """What was prepared for a config under this name, else what `make` returns. `write` makes and writes it."""
    name = hashlib.sha256(f"{what} {config.model_dump_json()}".encode()).hexdigest()[:16]
    path = FOLDER / "plans" / f"{name}.pickle"
    if not write and path.exists():
        found: T = pickle.loads(path.read_bytes())  # a file that this program wrote
        return found
    made = make()
    if write:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pickle.dumps(made))
    return made


def only_hopper(library: bytes) -> bytes:
    """Overwrite a library's GPU code for other GPUs than Hopper, its PTX and its debug information with zeros.

    Addresses stay, and zeros compress to almost nothing. A fat binary is a header (magic, version, header size, size)
    and entries (kind, version, header size, size, ..., compute capability at byte 28). One that has code for Hopper is
    left with this entry alone; one that has none is left as it is: CUDA would not find code in it before either.
    """
    data, place = bytearray(library), 0
    magic = struct.pack("<IHH", 0xBA55ED50, 1, 16)
    while (place := data.find(magic, place)) >= 0:
        start = place + 16
        at, end = start, start + struct.unpack_from("<Q", data, place + 8)[0]
        kept = bytearray()
        while at < end:
            kind, _, header, size = struct.unpack_from("<HHIQ", data, at)
            if kind == _CUBIN and struct.unpack_from("<I", data, at + 28)[0] == _HOPPER:
                kept += data[at : at + header + size]
            at += header + size
        if kept:
            data[start:end] = kept + bytes(end - start - len(kept))
            struct.pack_into("<Q", data, place + 8, len(kept))
        place = end
    # The sections of an ELF file of 64 bits: their headers, and the names of all.
    (headers,), (count, names) = struct.unpack_from("<Q", data, 40), struct.unpack_from("<HH", data, 60)
    sections = [struct.unpack_from("<IIQQQQ", data, headers + 64 * number) for number in range(count)]
    for name, _, _, _, offset, size in sections:
        first = sections[names][4] + name
        if data[first : first + 7] == b".debug_":
            data[offset : offset + size] = bytes(size)
    return bytes(data)


def pack_nccl(wheel: Path) -> None:
    """Write the library in a wheel of NCCL, with its code for Hopper alone, to prepared/nccl."""
    with ZipFile(wheel) as content:
        library = only_hopper(content.read("nvidia/nccl/lib/libnccl.so.2"))
    folder = FOLDER / "nccl"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "libnccl.so.2.xz").write_bytes(lzma.compress(library, filters=_FILTERS))


def pack_large(wheel: Path) -> None:
    """Write a wheel to prepared/large-N, without the compression of its own, compressed as a whole."""
    stored = io.BytesIO()
    with ZipFile(wheel) as content, ZipFile(stored, "w", ZIP_STORED) as copy:
        for one in content.infolist():
            copy.writestr(one.filename, content.read(one))
    packed = lzma.compress(stored.getvalue(), filters=_FILTERS)
    for number, start in enumerate(range(0, len(packed), PIECE_BYTES), start=1):
        folder = FOLDER / f"large-{number}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{wheel.name}.xz").write_bytes(packed[start : start + PIECE_BYTES])


def main() -> None:
    """Prepare the steps of the parts of first_hour.py's plan of 15 minutes, and what the command line names."""
    from benchmarks.gpu import one_rank_1m, train

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nccl", type=Path, metavar="WHEEL", help="a wheel of nvidia-nccl-cu13")
    parser.add_argument("--large", type=Path, metavar="WHEEL", help="a wheel of more than 50 MB")
    options = parser.parse_args()
    if options.nccl:
        pack_nccl(options.nccl)
    if options.large:
        pack_large(options.large)
    for case in (*train.PLANS, *train.TINY):
        train.steps_of(train.config_of(*case), write=True)
    for recipe in one_rank_1m.TRL_S:
        one_rank_1m.modelled_step(recipe, write=True)
    for folder in sorted(FOLDER.iterdir()):
        files = [path for path in folder.iterdir() if path.is_file()]
        print(f"{folder.name}: {len(files)} files, {sum(path.stat().st_size for path in files) / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
