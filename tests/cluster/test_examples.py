"""The files of `examples/cluster`: their options are a run, and the clients of Kubeflow, Kubernetes and SkyPilot accept their fields.

The clients' tests are slow ones: `pip install kubeflow-training skypilot`, then `pytest tests/cluster/test_examples.py --slow`.
"""

import json
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from tests.config.test_config import composed
from ztk.core.policies.machine import Machine

FOLDER = Path(__file__).parents[2] / "examples/cluster"
NODES = Machine(
    gpus=8, cores=64, started_ranks=16, started_here=8
)  # two with eight GPUs each, whose ranks torchrun has started


def read(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text())


def container(name: str) -> dict[str, Any]:
    """The container of an example for Kubernetes."""
    if name == "jobset.yaml":
        pod = read(name)["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    else:
        pod = read(name)["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
    return pod["spec"]["containers"][0]


def command(name: str) -> list[str]:
    """The words that start torchrun, and their own."""
    if name == "skypilot.yaml":
        return shlex.split(read(name)["run"].replace("$(echo", "").replace("| head -n 1)", ""))
    if name == "torchx.sh":
        return shlex.split((FOLDER / name).read_text().replace("\\\n", " "), comments=True)
    of = container(name)
    words = [*of["command"], *of["args"]]
    return shlex.split(words[-1]) if words[0] == "bash" else words


@pytest.mark.parametrize("name", ["jobset.yaml", "pytorchjob.yaml", "skypilot.yaml", "torchx.sh"])
def test_the_options_of_an_example_are_a_run(name, tmp_path):
    words = command(name)
    place = next(number for number, word in enumerate(words) if word.endswith("run.py"))
    options = [word for word in words[place + 1 :] if word != "--" and not word.startswith("hydra.")]
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("text")
    config = composed(*(word.replace("/shared/texts", str(texts)) for word in options), machine=NODES)
    assert (config.zero.stage, config.checkpoint.every, config.launch.device) == (3, 200, "cuda")
    shared = next(word for word in words if word.startswith("hydra.run.dir="))
    assert shared.startswith("hydra.run.dir=/shared/")


@pytest.mark.parametrize("name", ["jobset.yaml", "pytorchjob.yaml"])
def test_a_pod_has_the_gpus_of_its_ranks_and_the_shared_volume(name):
    of = container(name)
    each = read(name)["spec"].get("nprocPerNode") or next(
        word.partition("=")[2] for word in command(name) if word.startswith("--nproc-per-node=")
    )
    assert of["resources"]["limits"]["nvidia.com/gpu"] == int(each) == 8
    assert {"/shared", "/dev/shm"} == {mount["mountPath"] for mount in of["volumeMounts"]}


def lost_fields(given: Any, *, kept: Any, place: str = "") -> list[str]:
    """The fields that a client has dropped."""
    if isinstance(given, dict):
        missing = [f"{place}.{name}" for name in given if name not in kept]
        shared = (name for name in given if name in kept)
        return missing + [
            lost for name in shared for lost in lost_fields(given[name], kept=kept[name], place=f"{place}.{name}")
        ]
    if isinstance(given, list):
        pairs = enumerate(zip(given, kept, strict=True))
        return [lost for at, (a, b) in pairs for lost in lost_fields(a, kept=b, place=f"{place}[{at}]")]
    return []


@pytest.mark.slow
def test_the_clients_of_kubernetes_keep_every_field():
    """Of a PyTorchJob, and of the Job in a JobSet. They drop fields that the API has not, and raise an error for one that is missing."""
    clients = pytest.importorskip("kubeflow.training.api_client", reason="needs kubeflow-training")
    kubernetes = pytest.importorskip("kubernetes.client", reason="needs kubernetes")
    job = read("jobset.yaml")["spec"]["replicatedJobs"][0]["template"]
    for client, kind, given in (
        (clients.ApiClient(), "KubeflowOrgV1PyTorchJob", read("pytorchjob.yaml")),
        (kubernetes.ApiClient(), "V1JobTemplateSpec", job),
    ):
        known = client.deserialize(SimpleNamespace(data=json.dumps(given)), kind)
        assert not lost_fields(given, kept=client.sanitize_for_serialization(known))
        given["spec"]["nprocPerNod"] = "8"
        known = client.deserialize(SimpleNamespace(data=json.dumps(given)), kind)
        assert lost_fields(given, kept=client.sanitize_for_serialization(known)) == [".spec.nprocPerNod"]


@pytest.mark.slow
def test_skypilot_accepts_its_task():
    sky = pytest.importorskip("sky", reason="needs skypilot")
    task = sky.Task.from_yaml(str(FOLDER / "skypilot.yaml"))
    assert task.num_nodes == 2 and {one.accelerators["H100"] for one in task.resources} == {8}
