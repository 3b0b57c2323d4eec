"""Resolved recipes are golden texts, so a changed default shows in review; each can be planned and dry-run."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import pytest

from engine.config import tree
from engine.config.load import load
from engine.config.schema import Config
from engine.config.units import format_count
from engine.cost.budget import fits
from engine.cost.sizes import parameters
from engine.data.lengths import step_lengths
from engine.fit.check import fit_error
from engine.fit.estimate import estimate
from engine.job import Job
from engine.launch.run import train
from engine.planner.make import plan_step
from engine.simulator.facts import facts
from engine.simulator.hollow import empty_capacity, low_balance
from engine.units import NS
from tests.accepted import accepted, accepted_folder, accepted_names
from tests.recipes.golden_texts import golden_texts
from tests.root import ROOT

PROMISED = {"recipe", "model", "data", "cluster", "planner", "memory", "optimizer", "lengths"}
CONTEXTS = {"256k", "512k", "1m", "2m"}
NODES = {1: "1node", 2: "2nodes", 4: "4nodes", 16: "16nodes"}
LONG = ("llama7b", "llama13b", "llama30b", "llama70b", "llama3-8b", "mixtral8x7b", "mixtral8x22b")
DOCS = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
PLANS = Path(__file__).parent / "plans"
EACH = pytest.mark.parametrize("name", tree.recipes())


@cache
def recipe(name: str) -> Config:
    return load([f"recipe={name}"])


def test_golden() -> None:
    accepted_folder(Path(__file__).parent / "golden", golden_texts())


def test_promised_recipes() -> None:
    assert {f"{model}-{context}" for model in LONG for context in CONTEXTS} <= set(tree.recipes())


def test_recipes_for_nodes_of_eight_gpus() -> None:
    """Their names say how many nodes; the table of docs/recipes.md has them all."""
    named = {name: suffix for name in tree.recipes() for suffix in NODES.values() if name.endswith(f"-{suffix}")}
    assert set(named.values()) == set(NODES.values())
    for name, suffix in named.items():
        cluster = recipe(name).cluster
        assert (NODES[cluster.nodes], cluster.ranks_per_node) == (suffix, 8)

    table = {row[0]: row[1:] for row in re.findall(r"^\| `(\S+)` \| .* \| (\S+) \| (\S+) GiB \|$", DOCS, re.MULTILINE)}
    configs = {name: recipe(name) for name in named}
    peaks = {name: estimate(Job(config)).peak for name, config in configs.items()}
    assert table == {
        name: (format_count(config.batch_tokens), f"{peaks[name] / 2**30:.1f}") for name, config in configs.items()
    }


@pytest.mark.parametrize(
    ("name", "cluster", "most_s"),
    [
        ("qwen3-8b-1m-1node", "h200x8", 290),
        ("qwen3-8b-1m-1node", "h100x8", 380),  # TRL's measured steps; docs/recipes.md
        ("qwen3-8b-2m-2nodes", "h100x8", 696),
        ("qwen3-8b-4m-4nodes", "h100x8", 1346),
        ("llama3-8b-1m-1node", "h200x8", 290),
        ("llama3-8b-1m-1node", "h100x8", 380),
    ],
)
def test_a_million_tokens_on_a_node(name: str, cluster: str, most_s: float) -> None:
    """The step is one sequence as long as the context, on all ranks; the recipe is planned as shipped."""
    config = load([f"recipe={name}", f"cluster={cluster}"])
    settings = Job(config).settings
    lengths = next(iter(step_lengths(config, 1)))
    assert lengths.tolist() == [config.context] == [config.cluster.nodes * 2**20]
    found = facts(plan_step(lengths, settings), settings)
    assert found["largest_micro_batch"] == config.capacity == 2**17
    assert 0.7 * most_s < float(found["makespan_s"]) + settings.costs.step / NS <= most_s


@pytest.mark.parametrize("name", [name for name in tree.recipes() if recipe(name).run.weights])
def test_what_continues_a_hugging_face_folder(name: str) -> None:
    """Its tokenizer is that of the folder, wherever the user has it, and the learning rate that of trained weights."""
    config = load([f"recipe={name}", "run.weights=/models/mine"])
    assert config.data.tokenizer.startswith("/models/mine")
    assert config.optimizer.lr <= 2e-5
    assert config.optimizer.warmup_steps <= config.run.steps / 20
    assert config.data.field == ("messages" if "-sft-" in name else "text")


@EACH
def test_each_fits(name: str) -> None:
    config = recipe(name)
    assert fit_error(Job(config)) is None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few documents, two of them long."""
    found = tmp_path_factory.mktemp("documents")
    for number in range(24):
        (found / f"{number}.py").write_text(f"x = {number}\n" * (60_000 if number < 2 else 100 + 30 * number))
    return found


def small(name: str, folder: Path) -> Config:
    """A recipe with small steps from few documents; without the weights and the tokenizer that its user has."""
    own = ["data=folder", "data.tokenizer=bytes", "run.weights=null"] if recipe(name).data.name != "stdlib" else []
    return load([f"recipe={name}", *own, "batch_tokens=1M", f"data.path={folder}", f"run.out={folder}-run"])


@pytest.mark.long
@pytest.mark.parametrize("model", sorted({recipe(name).model.name for name in tree.recipes()}))
def test_no_plan_is_hollow(model: str) -> None:
    """The first step with the recipe's own lengths: what users see must not begin with a warning.

    The plan is golden, unless it is for documents of this Python's standard library.
    """
    golden = {}
    for name in (name for name in tree.recipes() if recipe(name).model.name == model):
        config = recipe(name)
        settings = Job(config).settings
        assert fits(settings.costs, config.capacity, settings.budget(settings.device_memory))
        plan = plan_step(next(iter(step_lengths(config, 1))), settings)
        found = facts(plan, settings)
        assert low_balance(config, float(found["balance"])) == []
        assert empty_capacity(config, settings.ranks, int(found["largest_micro_batch"])) == []
        if config.lengths.name != "data":
            golden[name] = f"{plan.digest} {1e9 * float(found['makespan_s']):.0f}"
    if golden:
        accepted(PLANS / f"{model}.json", json.dumps(golden, indent=1) + "\n")


def test_only_plans_of_models_of_recipes_are_golden() -> None:
    synthetic = [config for config in map(recipe, tree.recipes()) if config.lengths.name != "data"]
    accepted_names(PLANS, {f"{config.model.name}.json" for config in synthetic})


def kinds() -> list[str]:
    """One recipe of each kind of data, cluster, model family and start."""
    found = {}
    for name in tree.recipes():
        config = recipe(name)
        kind = (config.data.name, config.cluster.name, config.model.family, config.run.weights is None)
        found.setdefault(kind, name)
    return list(found.values())


@pytest.mark.parametrize("name", kinds())
def test_a_dry_run_with_a_fitting_hostfile_refuses_nothing(name: str, folder: Path, tmp_path: Path) -> None:
    """What a recipe ships can be trained."""
    config = small(name, folder)
    cluster = config.cluster
    if cluster.name != "local":
        hosts = "".join(f"worker-{node} slots={cluster.ranks_per_node}\n" for node in range(cluster.nodes))
        (tmp_path / "hosts").write_text(hosts, encoding="utf-8")
        changed = cluster.model_copy(update={"hostfile": str(tmp_path / "hosts")})
        config = config.model_copy(update={"cluster": changed})
    shown = train(config, dry_run=True)["dry_run"]
    assert len(shown["steps"]) == 3 and len(shown["commands"]) == shown["nodes"]
    assert shown["refused"] == []


@EACH
def test_angles_reach_the_context(name: str) -> None:
    """Scaled by at least context over the model's own; or a theta above the bound of Men et al. 2024, figure 1."""
    config = recipe(name)
    rope = config.model.rope
    if rope.kind == "none":
        assert config.context <= 2048 or config.model.rope_theta > 0.0424 * config.context**1.628
    else:
        assert rope.factor * rope.original_max_position_embeddings >= config.context


def test_promised_groups() -> None:
    assert set(tree.groups()) == PROMISED


@pytest.mark.parametrize(("group", "option"), [(g, o) for g, options in tree.groups().items() for o in options])
def test_every_file_says_what_it_is_and_loads(group: str, option: str) -> None:
    assert tree.about(tree.text_of(group, option))
    needs_path = ["data.path=somewhere"] if group == "data" and option != "stdlib" else []
    needs_path += ["lengths.path=somewhere"] if (group, option) == ("lengths", "file") else []
    config = recipe(option) if group == "recipe" else load([f"{group}={option}", *needs_path])
    if group == "memory":  # a choice of three keys, no section
        assert option == f"zero{config.zero.stage}" + ("_recompute" if config.recompute == "layer" else "")
    else:
        chosen = getattr(config, group)
        assert (chosen if group == "recipe" else chosen.name) == option


# Layers, hidden, query heads, key and value heads, ffn, vocabulary, experts, parameters in billions.
SHAPES = {
    "llama7b": (32, 4096, 32, 8, 11008, 32000, 1, 5.93),  # ByteScale, evaluation, table 2
    "llama13b": (40, 5120, 40, 8, 13824, 32000, 1, 11.3),
    "llama30b": (60, 6656, 52, 13, 17920, 32000, 1, 28.5),
    "llama70b": (80, 8192, 64, 8, 28672, 32000, 1, 69.0),
    "llama3-8b": (32, 4096, 32, 8, 14336, 128256, 1, 8.03),  # as published
    "llama3-70b": (80, 8192, 64, 8, 28672, 128256, 1, 70.6),
    "mixtral8x7b": (32, 4096, 32, 8, 14336, 32000, 8, 46.7),
    "mixtral8x22b": (56, 6144, 48, 8, 16384, 32768, 8, 140.6),
    "qwen3-8b": (36, 4096, 32, 8, 12288, 151936, 1, 8.19),
    "qwen3-30b-a3b": (48, 2048, 32, 4, 768, 151936, 128, 30.53),
    "1b": (16, 2048, 32, 8, 8192, 128256, 1, 1.24),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_are_those_that_were_published(name: str) -> None:
    model = load([f"model={name}", "context=1K", "capacity=1K"]).model
    shape = (model.layers, model.hidden, model.heads, model.kv_heads, model.ffn, model.vocab, model.experts)
    assert shape == SHAPES[name][:-1]
    assert parameters(model) / 1e9 == pytest.approx(SHAPES[name][-1], rel=0.005)
