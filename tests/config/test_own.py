"""Recipes of one's own: they compose as packaged ones do, and each mistake has its file, its line and its way out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from engine.config import tree
from engine.config.explain.origin import origins
from engine.config.load import load, resolved_yaml
from engine.config.resolved import read_resolved
from engine.errors import ConfigError, Problem
from tests.root import ROOT

SIZES = "context: 2K\ncapacity: 1K\nbatch_tokens: 4K\n"
DOCS = ROOT / "docs" / "recipes.md"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(text: str, name: str = "mine.yaml") -> None:
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text(text, encoding="utf-8")


def refused(*overrides: str) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        load(overrides)
    return list(caught.value.problems)


def test_it_composes_like_the_packaged_recipe_with_the_same_text() -> None:
    write(tree.text_of("recipe", "llama3-8b-2m"))
    assert load(["recipe=mine.yaml"]) == load(["recipe=llama3-8b-2m"])


def test_what_wins() -> None:
    """Own keys over own options over the recipe that it builds on; the command line over all."""
    write("defaults:\n  - llama7b-2m\n  - override /model: llama13b\n  - override /memory: zero3\nrun:\n  seed: 5\n")
    mine, below = load(["recipe=./mine.yaml"]), load(["recipe=llama7b-2m"])
    assert (mine.model.name, mine.zero.stage, mine.run.seed) == ("llama13b", 3, 5)
    assert (mine.context, mine.cluster, mine.optimizer) == (below.context, below.cluster, below.optimizer)
    above = load(["recipe=./mine.yaml", "model=tiny", "parallel.tp=1", "run.seed=6", "context=4K"])
    assert (above.model.name, above.run.seed, above.context) == ("tiny", 6, 4096)


def test_an_option_replaces_that_of_the_base_whatever_the_order_of_entries() -> None:
    assert load(["recipe=mixtral8x22b-2m"]).zero.stage == 3
    write("defaults:\n  - override /memory: zero1\n  - mixtral8x22b-2m\n")
    assert load(["recipe=mine.yaml"]).zero.stage == 1


def test_files_that_build_on_each_other_lie_relative_to_each_other() -> None:
    write(f"{SIZES}defaults: quickstart\nrun:\n  seed: 1\n  steps: 1\n", "team/base.yaml")
    write("defaults:\n  - ./base.yaml\nrun:\n  steps: 2\n", "team/model.yaml")
    write("defaults:\n  - team/model.yaml\noptimizer:\n  lr: 1e-4\n")
    config = load(["recipe=mine.yaml"])
    assert (config.recipe, config.run.seed, config.run.steps, config.optimizer.lr) == ("mine", 1, 2, 1e-4)
    assert load(["recipe=team/model.yaml"]).recipe == "model"


def test_self_says_where_its_own_keys_stand() -> None:
    for entries, seed in (("[quickstart, _self_]", 5), ("[_self_, base.yaml]", 6)):
        write("defaults: quickstart\nrun:\n  seed: 6\n", "base.yaml")
        write(f"defaults: {entries}\nrun:\n  seed: 5\n")
        assert load(["recipe=mine.yaml"]).run.seed == seed


@pytest.mark.parametrize(
    "name", ["mine.yaml", "./mine.yml", "a folder/my recipe.yaml", "./no-suffix", "MINE.YAML", "a=b,c.yaml"]
)
def test_paths(name: str) -> None:
    write(SIZES, name)
    config = load([f"recipe={name}"])
    assert (config.recipe, config.context) == (Path(name).stem, 2048)
    assert config.run.out == f"runs/{Path(name).stem}"
    assert load([f"recipe={Path(name).absolute()}"]) == load([f'recipe="{name}"']) == config


def test_home(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell leaves the tilde alone within a word, and YAML always."""
    monkeypatch.setenv("HOME", str(here))
    write(f"{SIZES}data:\n  path: ~/texts\n")
    assert load(["recipe=~/mine.yaml"]).data.path == f"{here}/texts"


def test_the_last_recipe_counts() -> None:
    write(f"{SIZES}run:\n  seed: 5\n")
    assert load(["recipe=quickstart", "recipe=mine.yaml"]).run.seed == 5
    assert load(["recipe=mine.yaml", "recipe=quickstart"]) == load([])


def test_one_file_leaves_nothing_behind_for_the_next_config() -> None:
    write(f"{SIZES}run:\n  seed: 5\n")
    load(["recipe=mine.yaml"])
    assert load([]).run.seed == 1234
    assert refused("recipe=own-0")[0].message == "unknown name: own-0"


def test_a_run_does_not_need_the_file_any_more() -> None:
    """Ranks and a resumed run read resolved.yaml, which is a recipe itself."""
    write("defaults: llama3-8b-64k-1node\nrun:\n  seed: 5\n")
    config = load(["recipe=mine.yaml"])
    write(resolved_yaml(config), "resolved.yaml")
    Path("mine.yaml").unlink()
    assert read_resolved(Path("resolved.yaml")) == load(["recipe=resolved.yaml"]) == config


def test_the_example_of_the_docs() -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    write(text)
    config = load(["recipe=mine.yaml"])
    assert (config.model.name, config.context, config.cluster.name) == ("llama3-8b", 128 << 10, "h200x8")


MISTAKES = [
    ("run:\n  step: 3", 2, "run.step: unknown key", "did you mean run.steps?"),
    ("\nrunn:\n  steps: 3", 2, "runn: unknown key", "config show"),
    ("lr: 3", 1, "lr: unknown key", "did you mean optimizer.lr?"),
    ("optimizer.lr: 3", 1, "optimizer.lr: is written with dots", "`optimizer:` and below it `lr: 3`"),
    ("optimizer: adamw", 1, "optimizer: is a group", "- override /optimizer: adamw"),
    ("memory: zero3", 1, "memory: is a group", "- override /memory: zero3"),
    ("zero: 3", 1, "zero: is a section", "write its keys below it"),
    ("run:", 1, "run: is a section", "write its keys below it"),
    ("model:\n  rope: yarn", 2, "model.rope: is a section", "write its keys below it"),
    ("_target_: os.system", 1, "_target_: unknown key", "config show"),
    ("model:\n  layers: 1\n  _target_: os.system", 3, "model._target_: unknown key", "keys of model"),
    ("hydra:\n  searchpath: [file:///tmp]", 1, "hydra: unknown key", "config show"),
    ("run:\n  steps: 0", 2, "run.steps: must be at least 1, not 0", "run.steps=1 or more"),
    ("run:\n  steps: many", 2, "run.steps: must be a whole number, not many", "optimizer updates"),
    ("dtype: fp23", 1, "dtype: must be bf16, fp32 or fp64, not fp23", "did you mean fp32?"),
    ("run:\n  out: ${nowhere}", 2, "run.out: cannot be resolved", "must name another key"),
    ("model:\n  heads: 2\n  kv_heads: 3", 3, "model.kv_heads: ", None),
    ("defaults: [model: tiny]", 1, "defaults: cannot be read: model: tiny", "write - override /model: tiny"),
    ("defaults:\n- override model: tiny", 2, "cannot be read: override model: tiny", "- override /model: tiny"),
    ("defaults:\n- override /modle: tiny", 2, "defaults: unknown group: modle", "did you mean model?"),
    ("defaults:\n- override /model: tinny", 2, "defaults: model: unknown name: tinny", "did you mean tiny?"),
    ("defaults:\n- override /model: [tiny]", 2, "defaults: model: is a group", "choose one of"),
    ("defaults:\n- quikstart", 2, "defaults: unknown recipe: quikstart", "did you mean quickstart?"),
    ("defaults:\n- base/lama7b", 2, "defaults: unknown recipe: base/lama7b", "did you mean base/llama7b?"),
    ("defaults:\n- recipe: quickstart", 2, "defaults: a recipe is named without its group", "write - quickstart"),
    ("defaults:\n- quickstart\n- llama7b-2m", 3, "llama7b-2m: builds on a second recipe", "one recipe only"),
    ("defaults:\n- none.yaml", 2, "no such file: none.yaml", "recipes copy"),
    ("defaults:\n- 3", 2, "defaults: is not an entry", "for example"),
    (
        "defaults:\n- override /model: tiny\n- override /model: 1b",
        3,
        "defaults: model is chosen twice",
        "keep one of them",
    ),
    ("recipe: llama7b-2m", 1, "recipe: does not choose a recipe", "write `defaults:` and below it `- llama7b-2m`"),
    ("run:\n  steps: 5\n bad", 3, "is not valid YAML", "KEY: VALUE"),
    ("run: {seed: 1}\nrun: {seed: 2}", 2, "is not valid YAML: found duplicate key run", "KEY: VALUE"),
    ("run: !!python/object:os.system {}", 1, "is not valid YAML", "KEY: VALUE"),
    ("- a", 1, "is not a recipe", "recipes copy"),
    ("word", 1, "is not a recipe", "recipes copy"),
]


@pytest.mark.parametrize(("text", "line", "message", "hint"), MISTAKES)
def test_mistakes(text: str, line: int, message: str, hint: str | None) -> None:
    sizes = "" if text.startswith(("-", "word")) else f"\n{SIZES}"
    write(text + sizes)
    (problem,) = refused("recipe=mine.yaml")
    assert problem.key == f"mine.yaml:{line}"
    assert message in problem.message
    assert hint is None or hint in (problem.hint or "")
    assert "ydra" not in problem.message.replace("hydra: ", "") + (problem.hint or "")


@pytest.mark.parametrize("defaults", ["", "defaults:\n  - override /model: llama13b\n"])
def test_a_file_that_builds_on_no_recipe_is_told_so_instead_of_all_its_missing_keys(defaults: str) -> None:
    write(f"{defaults}run:\n  steps: 1\n")
    (problem,) = refused("recipe=mine.yaml")
    assert problem.key == "mine.yaml:1" and "context, capacity, batch_tokens" in problem.message
    assert "`defaults: quickstart`" in str(problem.hint)
    write(f"{defaults}{SIZES}run:\n  steps: 1\n")
    assert load(["recipe=mine.yaml"]).run.steps == 1


def test_all_mistakes_come_at_once() -> None:
    write(f"{SIZES}run:\n  step: 1\n  seed: -1\nzero:\n  stag: 3\n")
    problems = refused("recipe=mine.yaml", "optimizer.lr=fast", "run.stops=3")
    keys = ["mine.yaml:5", "mine.yaml:6", "mine.yaml:8", "optimizer.lr", "run.stops"]
    assert sorted(str(problem.key) for problem in problems) == keys


def test_a_value_of_the_command_line_is_no_mistake_of_the_file() -> None:
    write(f"{SIZES}run:\n  steps: 3\n")
    (problem,) = refused("recipe=mine.yaml", "run.steps=0")
    assert problem.key == "run.steps"
    (problem,) = refused("recipe=mine.yaml", "data=folder")
    assert problem.key == "data.path"


def test_a_mistake_in_the_file_below_is_told_there() -> None:
    write(f"{SIZES}run:\n  steps: 0\n  stop: 1\n", "base.yaml")
    write("defaults: base.yaml\n")
    assert {problem.key for problem in refused("recipe=mine.yaml")} == {"base.yaml:5", "base.yaml:6"}


@pytest.mark.parametrize("names", [["mine.yaml"], ["b.yaml", "mine.yaml"], ["b.yaml", "./c.yaml", "../{}/mine.yaml"]])
def test_a_file_that_includes_itself(names: list[str], here: Path) -> None:
    above = "mine.yaml"
    for name in names:
        write(f"{SIZES}defaults:\n  - {name.format(here.name)}\n", above)
        above = name.format(here.name)
    (problem,) = refused("recipe=mine.yaml")
    assert "includes itself" in problem.message
    assert str(problem.key).endswith(f"{Path(names[-2]).name if len(names) > 1 else 'mine.yaml'}:5")


def test_files_that_cannot_be_read(here: Path) -> None:
    (missing,) = refused("recipe=./llama3-8b-1n.yaml")
    assert (missing.key, missing.message) == ("recipe", "no such file: llama3-8b-1n.yaml")
    assert missing.hint == "did you mean llama3-8b-1m?"
    (folder,) = refused(f"recipe={here}")
    assert "cannot be read: Is a directory" in folder.message
    Path("circle.yaml").symlink_to("circle.yaml")
    for name in ("circle.yaml", f"./{'x' * 300}"):
        assert "cannot be read: " in refused(f"recipe={name}")[0].message
    Path("latin.yaml").write_bytes(b"# \xfc\n")
    (latin,) = refused("recipe=latin.yaml")
    assert (latin.key, latin.hint) == ("latin.yaml:1", "save the file as UTF-8")
    write("a: &x\n  b: *x\n")
    (endless,) = refused("recipe=mine.yaml")
    assert "contains itself" in endless.message


def test_a_name_of_a_file_in_this_folder_is_told_to_be_a_path() -> None:
    write(SIZES)
    (problem,) = refused("recipe=mine")
    assert problem.hint == "write recipe=./mine.yaml for the file in this folder"


def test_experts_without_a_family_choose_it_as_they_did_before_families_had_names() -> None:
    write(f"{SIZES}defaults: quickstart\nmodel:\n  experts: 4\n  top_k: 2\n")
    assert load(["recipe=mine.yaml"]).model.family == "mixtral"
    assert origins(["recipe=mine.yaml"])["model.family"] == "mine.yaml:6"
    (problem,) = refused("recipe=mine.yaml", "model.family=llama")
    assert problem.key == "mine.yaml:6" and "model.family=mixtral" in str(problem.hint)
    write("defaults:\n  - mixtral8x7b-2m\nmodel:\n  experts: 1\n  top_k: 1\nparallel:\n  ep: 1\n")
    assert load(["recipe=mine.yaml"]).model.family == "llama"
    write("defaults:\n  - mixtral8x7b-2m\nmodel:\n  experts: 16\n")
    assert load(["recipe=mine.yaml"]).model.family == "mixtral"
