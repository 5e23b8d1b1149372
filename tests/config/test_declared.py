"""A key is declared once, in its section: everything else follows."""

import ast
import json
import re
import subprocess
import sys
from dataclasses import MISSING
from pathlib import Path
from typing import Any

from ztk.cli.session import Session
from ztk.config import Machine, compose, from_yaml, to_explained_yaml, to_yaml
from ztk.config.keys import expected, line_keys, run_keys
from ztk.core.policies.align import DpoPolicy
from ztk.core.policies.ema import EmaPolicy
from ztk.core.policies.key import declared_keys, policy_of
from ztk.core.policies.offload import OffloadConfig, OffloadPolicy
from ztk.core.policies.optimizer import OptimizerPolicy
from ztk.core.policies.pipeline import PipelinePolicy
from ztk.core.policies.recompute import RecomputePolicy
from ztk.core.policies.reward import PairwisePolicy
from ztk.core.policies.schedule import SchedulePolicy
from ztk.core.policies.tensor import TensorPolicy
from ztk.core.policies.train import TrackerPolicy
from ztk.core.policies.zero import ZeroPolicy

ROOT = Path(__file__).parents[2]
# Class -> fields that stand in its body and, with the same name, in a section, too. They differ: no declaration could serve both.
DIFFERENT = {
    "CometPolicy": 2,  # keys of ds_config.json, which are not keys of the command line
    "PrecisionPolicy": 4,  # dtypes of torch, which the sections do not import; autocast and bf16_master are DeepSpeed's alone
    "RolloutPolicy": 3,  # numbers of one drawing, of several sections and of the data; a drawing without them would be a wrong one
    "TextPolicy": 2,  # the files of one reading, of any section or a script
}
# Declares train.patience before anything has read the section, and prints everything that is derived from the declaration.
SCRIPT = '''
import json
from dataclasses import dataclass

from ztk.core.policies import train
from ztk.core.policies.key import Changes, key, tasks
from ztk.core.policies.ranges import COUNT


def too_patient(config):
    if config.train.patience > config.train.steps:
        yield f"train.patience={config.train.patience} is more than train.steps={config.train.steps}: use train.patience=1"


@dataclass(kw_only=True)
class TrainConfig(train.TrainConfig):
    """Length, batch and evaluation of a run."""

    patience: int | None = key(
        "evaluations without progress after which a run ends",
        default=5,
        range=COUNT,
        acts=tasks("pretrain"),
        contradicts=too_patient,
        changes=Changes.experiment,
    )


train.TrainConfig = TrainConfig

from ztk.cli.help import requested_help
from ztk.config import ConfigError, Machine, build_reference, compose, conf_dir, job_hash
from ztk.core.policies.experiment import changes_numbers


def run(*words):
    try:
        return compose(*words, output_dir="/tmp/declared", machine=Machine(gpus=0, cores=2))
    except ConfigError as error:
        return error.faults


line = next(key for key in build_reference([conf_dir()])["train"].keys if key.name == "train.patience")
print(json.dumps({
    "help": " ".join(requested_help(["--help", "train.patience"]).split()),
    "docs": [line.meaning, line.takes, line.default, line.only],
    "default": run().train.patience,
    "inactive": run("task=sft").train.patience,
    "type": run("train.patience=often"),
    "range": run("train.patience=0"),
    "no effect": run("task=sft", "train.patience=3"),
    "missing": run("train.patience=null"),
    "contradicts": run("train.patience=900"),
    "near": run("train.patienc=900"),
    "hash": job_hash(run()) != job_hash(run("train.patience=4")),
    "numbers": changes_numbers("train.patience"),
}))
'''


def test_a_key_is_declared_in_one_place():
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    meaning, takes = "evaluations without progress after which a run ends", "a whole number, 1 or more, or null"
    assert found["docs"] == [meaning, takes, "5", "task=pretrain"]
    assert found["help"] == f"train.patience {meaning} takes {takes} default 5 only with task=pretrain"
    assert (found["default"], found["inactive"]) == (5, None)
    assert found["type"] == ["train.patience=often: must be a whole number or null"]
    assert found["range"] == ["train.patience=0: must be 1 or more and at most 2147483647"]
    assert found["no effect"] == ["train.patience=3 has no effect here, only with task=pretrain: leave it out"]
    assert found["missing"] == ["train.patience must have a value: choose task=pretrain"]
    assert found["contradicts"] == ["train.patience=900 is more than train.steps=300: use train.patience=1"]
    assert found["near"] == ["train.patienc: there is no such key; did you mean train.patience?"]
    assert found["hash"] and not found["numbers"]


def _fields_of_policies():
    """Class name -> the fields that its body declares without `key`, of every class of the library whose name ends in Policy."""
    for path in (ROOT / "ztk").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for node in ast.parse(text).body if re.search(r"^class \w+Policy\b", text, re.MULTILINE) else ():
            if isinstance(node, ast.ClassDef) and node.name.endswith("Policy"):
                fields = [line for line in node.body if isinstance(line, ast.AnnAssign)]
                is_key = {
                    line.target.id: isinstance(line.value, ast.Call) and ast.unparse(line.value.func) == "key"
                    for line in fields
                }
                yield node.name, {name for name, declared in is_key.items() if not declared}


def test_no_field_is_declared_twice():
    sections: dict[str, set[str]] = {}
    for name in run_keys():
        section, _, key = name.rpartition(".")
        sections.setdefault(section, set()).add(key)
    shared = {name: max(len(fields & keys) for keys in sections.values()) for name, fields in _fields_of_policies()}
    assert {name: count for name, count in shared.items() if count > 1} == DIFFERENT


def test_the_command_line_and_the_library_make_the_same_policy():
    def made(policy, section, *words):
        config = compose(*words, output_dir="/tmp/declared", machine=Machine(gpus=0, cores=2))
        return policy_of(policy, given=getattr(config, section))

    folder = "/tmp/declared/nvme"
    assert made(ZeroPolicy, "zero", "zero=stage3") == ZeroPolicy(stage=3)
    assert made(OptimizerPolicy, "optimizer", "optimizer=sgd") == OptimizerPolicy(
        name="sgd", lr=0.1, momentum=0.9, clip_grad_norm=1.0
    )
    assert made(SchedulePolicy, "scheduler", "scheduler=wsd", "train.steps=100") == SchedulePolicy(
        name="wsd", warmup_steps=5, decay_steps=10, final=0.1
    )
    assert made(RecomputePolicy, "recompute", "recompute=every2") == RecomputePolicy(mode="full", every=2)
    assert made(EmaPolicy, "ema", "ema.decay=0.9") == EmaPolicy(decay=0.9)
    assert made(OffloadPolicy, "offload") == OffloadPolicy()
    assert made(DpoPolicy, "dpo", "task=dpo") == DpoPolicy()
    assert made(DpoPolicy, "dpo", "task=dpo", "dpo.loss=kto", "dpo.desirable_weight=2") == DpoPolicy(
        loss="kto", desirable_weight=2.0
    )
    assert made(PipelinePolicy, "topology", "topology=pp2") == PipelinePolicy()
    interleaved = ("topology.schedule=interleaved", "topology.virtual_stages=2", "train.accumulation_steps=2")
    assert made(PipelinePolicy, "topology", "topology=pp2", *interleaved) == PipelinePolicy(
        schedule="interleaved", virtual_stages=2
    )
    assert made(TensorPolicy, "topology", "topology=tp2", "topology.sequence_parallel=true") == TensorPolicy(
        sequence_parallel=True
    )
    assert made(TrackerPolicy, "logger", "logger=csv") == TrackerPolicy(mode="csv")
    assert made(PairwisePolicy, "reward", "task=reward", "reward.margin=1") == PairwisePolicy(margin=1.0)
    assert made(OffloadPolicy, "offload", "zero=stage3", "offload=nvme", "offload.threads=2") == OffloadPolicy(
        optimizer="nvme", parameters="nvme", nvme_path=folder, threads=2
    )


def test_a_section_has_the_keys_of_its_policy():
    threads = declared_keys(OffloadConfig)["threads"]
    assert (threads.hint, threads.default) == (int | None, OffloadPolicy().threads)
    pinned = declared_keys(OffloadConfig)["pin_memory"]
    assert (pinned.default, OffloadPolicy().pin_memory) == (None, True)  # null: the policy's
    assert declared_keys(OffloadConfig)["optimizer"].default is MISSING


def test_every_default_is_accepted():
    for name, key in line_keys().items():
        if key.default not in (None, MISSING) and key.range is not None:
            assert not key.range.fault(key.default), name


def test_what_may_not_act_can_be_none():
    """A key without effect in a run is None there."""
    typed = {name: key for name, key in run_keys().items() if key.acts and key.hint is not Any}
    assert [name for name, key in typed.items() if " or null" not in expected(key.hint)] == []


def test_what_acts_is_shown_alone_and_read_back(monkeypatch):
    config = compose(
        "zero=stage3", "user.a=null", "user.b=0", output_dir="/tmp/declared", machine=Machine(gpus=0, cores=2)
    )
    text = to_explained_yaml(config, acting_alone=True)
    assert len(text.splitlines()) < 100 and "a: null" in text and text.count("null") == 1
    assert from_yaml(text) == config and "rollout" not in text
    complete = to_explained_yaml(config)
    assert from_yaml(complete) == config and "rollout:\n  task: null" in complete
    shown = {}
    for which in ("job", "all"):
        monkeypatch.setattr(sys, "argv", ["run.py", "zero=stage3", "launch.device=cpu", "--cfg", which])
        shown[which] = Session()._prepare_arguments()
    assert "null" not in shown["job"] and "rollout:\n  task: null" in shown["all"]


def test_a_record_without_a_key_is_of_a_run_in_which_it_took_no_part():
    text = to_yaml(compose("zero=stage3", output_dir="/tmp/declared", machine=Machine(gpus=0, cores=2)))
    assert from_yaml(text.replace("  bucket_size: 500000000\n", "")).zero.bucket_size is None
