from __future__ import annotations

from pathlib import Path

import pytest

from engine.config.explain.hub import hub_hint


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("https://huggingface.co/org/model", "org/model"),
        ("hf://org/model", "org/model"),
        ("./org/model", None),
        ("/org/model", None),
        ("a/b/c", None),
        ("model", None),
        ("folder/tokenizer.json", None),
        ("../model", None),
        ("weights/llama3-8b", None),
        ("models/llama3-8b", None),
        ("mine/llama3-8b", None),  # `mine` is a folder here
        ("hf://models/org/model", "org/model"),
    ],
)
def test_names_on_the_hub_get_the_command_that_downloads_them(
    path: str, name: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    hint = hub_hint(path)
    assert (hint is None) == (name is None) and (
        name is None or f"`hf download {name} --local-dir FOLDER`" in str(hint)
    )
