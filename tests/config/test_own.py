"""Recipes of one's own: they compose as packaged ones do. Mistakes in them are in tests/mistakes/recipes.yaml."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from engine.config import tree
from engine.config.explain.origin import origins
from engine.config.load import load, resolved_yaml
from engine.config.resolved import read_resolved
from engine.errors import ConfigError
from tests.refusals import refused
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
    with refused(ConfigError, "recipe"):
        load(["recipe=own-0"])


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


@pytest.mark.parametrize("defaults", ["", "defaults:\n  - override /model: llama13b\n"])
def test_a_file_that_builds_on_no_recipe_is_told_so_instead_of_all_its_missing_keys(defaults: str) -> None:
    write(f"{defaults}run:\n  steps: 1\n")
    with refused(ConfigError, "mine.yaml:1"):
        load(["recipe=mine.yaml"])
    write(f"{defaults}{SIZES}run:\n  steps: 1\n")
    assert load(["recipe=mine.yaml"]).run.steps == 1


def test_all_mistakes_come_at_once() -> None:
    write(f"{SIZES}run:\n  step: 1\n  seed: -1\nzero:\n  stag: 3\n")
    keys = ("mine.yaml:5", "mine.yaml:8", "run.stops", "mine.yaml:6", "optimizer.lr")
    with refused(ConfigError, *keys):
        load(["recipe=mine.yaml", "optimizer.lr=fast", "run.stops=3"])


def test_a_value_of_the_command_line_is_no_mistake_of_the_file() -> None:
    write(f"{SIZES}run:\n  steps: 3\n")
    for override, key in (("run.steps=0", "run.steps"), ("data=folder", "data.path")):
        with refused(ConfigError, key):
            load(["recipe=mine.yaml", override])


def test_a_mistake_in_the_file_below_is_told_there() -> None:
    write(f"{SIZES}run:\n  steps: 0\n  stop: 1\n", "base.yaml")
    write("defaults: base.yaml\n")
    with refused(ConfigError, "base.yaml:6", "base.yaml:5"):
        load(["recipe=mine.yaml"])


@pytest.mark.parametrize("names", [["mine.yaml"], ["b.yaml", "mine.yaml"], ["b.yaml", "./c.yaml", "../{}/mine.yaml"]])
def test_a_file_that_includes_itself(names: list[str], here: Path) -> None:
    above = "mine.yaml"
    for name in names:
        write(f"{SIZES}defaults:\n  - {name.format(here.name)}\n", above)
        above = name.format(here.name)
    with refused(ConfigError, f"...{Path(names[-2]).name if len(names) > 1 else 'mine.yaml'}:5"):
        load(["recipe=mine.yaml"])


def test_files_that_cannot_be_read(here: Path) -> None:
    Path("circle.yaml").symlink_to("circle.yaml")
    for name, key in (("./none.yaml", "recipe"), (str(here), str(here)), ("circle.yaml", "circle.yaml")):
        with refused(ConfigError, key):
            load([f"recipe={name}"])
    with refused(ConfigError):
        load([f"recipe=./{'x' * 300}"])


def test_experts_without_a_family_choose_it_as_they_did_before_families_had_names() -> None:
    write(f"{SIZES}defaults: quickstart\nmodel:\n  experts: 4\n  top_k: 2\n")
    assert load(["recipe=mine.yaml"]).model.family == "mixtral"
    assert origins(["recipe=mine.yaml"])["model.family"] == "mine.yaml:6"
    with refused(ConfigError, "mine.yaml:6"):
        load(["recipe=mine.yaml", "model.family=llama"])
    write("defaults:\n  - mixtral8x7b-2m\nmodel:\n  experts: 1\n  top_k: 1\nparallel:\n  ep: 1\n")
    assert load(["recipe=mine.yaml"]).model.family == "llama"
    write("defaults:\n  - mixtral8x7b-2m\nmodel:\n  experts: 16\n")
    assert load(["recipe=mine.yaml"]).model.family == "mixtral"
