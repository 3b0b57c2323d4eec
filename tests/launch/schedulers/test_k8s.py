"""The manifest starts one pod for each node, which find each other, and are started again only when that helps."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from bytescale_cli.main import run
from engine.config.load import load
from engine.errors import ConfigError
from engine.launch.schedulers.joined import joined
from engine.launch.schedulers.k8s import manifest
from tests.refusals import refused

GIVEN = ("k8s.image=registry/bytescale:1", "k8s.claim=training")


def rendered(*overrides: str, words: tuple[str, ...] = ("train", "recipe=quickstart")) -> tuple[Any, Any]:
    """The Service and the Job of a config."""
    service, job = yaml.safe_load_all(manifest(load([*GIVEN, *overrides]), words))
    return service, job


def test_a_pod_for_each_node_and_names_for_the_pods() -> None:
    """The fields are those of batch/v1 and v1; what the API requires for podFailurePolicy is there."""
    service, job = rendered("recipe=llama7b-256k", "cluster.nodes=4", "k8s.namespace=ml", "k8s.grace=300")
    assert (service["apiVersion"], service["kind"], job["apiVersion"], job["kind"]) == (
        "v1",
        "Service",
        "batch/v1",
        "Job",
    )
    name = service["metadata"]["name"]
    assert service["metadata"] == job["metadata"] == {"name": name, "namespace": "ml"}
    assert service["spec"]["clusterIP"] == "None", "a headless service is the text None, not null"
    assert service["spec"]["selector"] == {"job-name": name}
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (4, 4, "Indexed")
    assert (pod["subdomain"], pod["restartPolicy"]) == (name, "Never")
    assert pod["terminationGracePeriodSeconds"] == 300
    (container,) = pod["containers"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 8}}
    assert container["command"] == ["bytescale", "train", "recipe=quickstart"]
    assert (container["image"], container["workingDir"]) == ("registry/bytescale:1", "/shared")
    mounted = {volume["name"] for volume in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    assert {"name": "shared", "persistentVolumeClaim": {"claimName": "training"}} in pod["volumes"]


def test_exit_codes_decide_whether_pods_are_started_again() -> None:
    _, job = rendered("cluster.nodes=2", "run.restarts=3")
    rules = job["spec"]["podFailurePolicy"]["rules"]
    name = job["spec"]["template"]["spec"]["containers"][0]["name"]
    of_codes = {
        code: rule["action"]
        for rule in rules
        if (codes := rule.get("onExitCodes")) and codes["operator"] == "In" and codes["containerName"] == name
        for code in codes["values"]
    }
    assert of_codes == {2: "FailJob", 93: "FailJob", 75: "Ignore"}
    assert {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]} in rules
    assert job["spec"]["backoffLimit"] == 8, "both pods fail in each of the four attempts"


def test_a_pod_knows_its_place_from_the_manifest() -> None:
    _, job = rendered("cluster.nodes=4")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    variables = {one["name"]: one.get("value", "from the pod") for one in container["env"]}
    place = joined({**variables, "JOB_COMPLETION_INDEX": "3"})
    assert place is not None and (place.node, place.nodes, place.by) == (3, 4, "Kubernetes")
    name = job["metadata"]["name"]
    assert variables["MASTER_ADDR"] == f"{name}-0.{name}"
    assert "resources" not in container, "ranks of cluster=local are CPU processes"


def test_words_reach_the_pod_as_they_are() -> None:
    _, job = rendered(words=("train", "data.path=a b", "run.out=$(HOME)", "it's: {x}"))
    assert job["spec"]["template"]["spec"]["containers"][0]["command"][2:] == [
        *("data.path=a b", "run.out=$$(HOME)", "it's: {x}")
    ], "Kubernetes replaces $(NAME), unless the dollar is doubled"


def test_what_is_missing_is_asked_for_at_once() -> None:
    with refused(ConfigError, "k8s.image", "k8s.claim"):
        manifest(load([]), ["train"])
    with refused(ConfigError, "run.out=/elsewhere/run") as problems:
        rendered("run.out=/elsewhere/run")
    assert "/shared" in str(problems[0].hint) and "k8s.mount" in str(problems[0].hint)
    rendered("run.out=/shared/run")


def test_names_are_those_that_kubernetes_accepts() -> None:
    """RFC 1123: at most 63 letters, digits and dashes. Pods add an index, and may add five digits."""
    config = load([*GIVEN])
    for recipe, part in (
        ("llama70b-2m-paper", "llama70b-2m-paper"),
        ("my/Räder_7B.yaml", "r-der-7b"),
        ("多语言", "run"),
        ("9" * 99, "9" * 32),
    ):
        service, job = yaml.safe_load_all(manifest(config.model_copy(update={"recipe": recipe}), ["train"]))
        name = job["metadata"]["name"]
        assert name == service["metadata"]["name"]
        assert re.fullmatch(f"bytescale-{part}-[0-9a-f]{{8}}", name) and len(f"{name}-65535-abcde") <= 63


def test_runs_in_two_folders_have_two_names() -> None:
    """Those of one folder have one name, however it is written, so that it gets one job at a time."""
    names = [rendered(f"run.out={out}")[1]["metadata"]["name"] for out in ("a", "b", "./a", "/shared/a")]
    assert names[0] != names[1] and names[2] == names[3] == names[0]


def test_the_manifest_is_printed_and_written_but_not_applied(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["train", "--launcher", "k8s", "--out", "run", *GIVEN, "cluster.nodes=2"]
    assert run([*words, "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert not (tmp_path / "run").exists()
    assert run([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["k8s"]
    assert told["text"] == text == (tmp_path / told["manifest"]).read_text()
    assert run(words) == 0
    captured = capsys.readouterr()
    assert captured.out == text and "kubectl apply -f run/k8s.yaml" in captured.err
