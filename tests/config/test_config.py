"""Composing and refusing, without starting anything."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ztk.config import Config, ConfigError, Machine, compose, conf_dir, from_yaml, to_yaml
from ztk.config.arguments import options_of
from ztk.config.keys import run_keys

CPU = Machine(gpus=0, cores=2)
GPU = Machine(gpus=4, cores=16)
GOLDENS = Path(__file__).with_name("goldens")
GROUPS = options_of([conf_dir()])


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("OMP_NUM_THREADS", "TRITON_INTERPRET"):
        monkeypatch.delenv(name, raising=False)


def composed(*overrides: str, machine: Machine = CPU) -> Config:
    return compose(*overrides, output_dir="/run", machine=machine)


def faults(*overrides: str, machine: Machine = CPU) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        composed(*overrides, machine=machine)
    return caught.value.faults


@pytest.mark.parametrize(
    "name, overrides",
    [
        ("default", ()),
        ("main_job", ("zero=stage3", "offload=nvme")),
        *[(f"experiment_{name}", (f"experiment={name}",)) for name in GROUPS["experiment"]],
    ],
)
def test_resolved_configurations_are_the_recorded_ones(name, overrides, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *args: True)  # /run/nvme need not be writable here
    assert to_yaml(composed(*overrides)) == (GOLDENS / f"{name}.yaml").read_text()


# These need an object, a folder, a file or a package: tests/config/test_hugging_face.py, test_here.py, test_distill.py,
# tests/cluster
ELSEWHERE = {("launch", "ray"), ("model", "hf"), ("lora", "adapter"), ("hardware", "here"), ("task", "distill")}
OPTIONS = [
    (group, option)
    for group in sorted(set(GROUPS) - {"sweep", "experiment", "data", "kernels"})
    for option in GROUPS[group]
    if (group, option) not in ELSEWHERE and option != "own"
]


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_composes(group, option, tmp_path):
    model = ("model=30m",) if group == "topology" else ()  # whose heads every degree divides
    if group == "topology" and re.search(r"ep\d", option):
        model = ("model=tiny_moe",)
    if group == "algorithm":
        model = (f"task={'ppo' if option == 'ppo' else 'grpo'}",)
    if group == "hardware":
        model = ("task=plan",)
    if option in ("generate", "serve", "eval") or group == "weights":
        model = (f"inference.model={tmp_path}",)
    if group == "weights":
        model += ("task=serve",)
    if option == "generate":
        model += (f"inference.prompts={__file__}",)
    if option == "eval":
        model += (f"eval.path={__file__}",)
    machine = Machine(gpus=1, cores=2) if option == "bf16" and group == "weights" else CPU
    config = compose(f"{group}={option}", *model, output_dir=tmp_path, machine=machine)
    assert from_yaml(to_yaml(config)) == config


@pytest.mark.parametrize("offload", ["none", "cpu", "nvme"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_takes_every_tier(stage, offload, tmp_path):
    config = compose(f"zero=stage{stage}", f"offload={offload}", output_dir=tmp_path, machine=CPU)
    assert config.offload.optimizer == offload
    assert config.offload.parameters == (offload if stage == 3 else "none")
    assert config.offload.nvme_path == (str(tmp_path / "nvme") if offload == "nvme" else None)


@pytest.mark.parametrize(
    ("overrides", "ranks", "batches"),
    [
        (("topology=tp2",), 2, 1),
        (("topology=tp2_dp2",), 4, 2),
        (("topology=tp2", "launch.ranks=4"), 4, 2),
        (("topology=tp2", "topology.data=3"), 6, 3),
        (("topology=sp2_dp2",), 4, 2),
        (("topology=pp2_dp2",), 4, 2),
        (("topology=tp2_pp2_dp2",), 8, 2),
        (("launch.ranks=3",), 3, 3),
    ],
)
def test_a_layout_names_its_ranks(overrides, ranks, batches, tmp_path):
    config = compose(*overrides, output_dir=tmp_path, machine=CPU)
    assert (config.launch.ranks, config.topology.data) == (ranks, batches)
    assert config.train.global_batch_size == config.topology.data * config.train.micro_batch_size


def test_the_starting_process_imports_no_torch():
    code = "import sys, ztk.cli, ztk.worker; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(conf_dir()).parent).returncode == 0


def test_every_option_file_has_a_description():
    assert [path for path in Path(conf_dir()).glob("*/*.yaml") if not path.read_text().startswith("# ")] == []


def test_names_are_refused_all_at_once_with_what_was_meant():
    found = faults(
        "zero=stge3", "lr=1", "+foo=1", "++train.stpes=2", "train.steps=abc", "offload.optimizer=gpu", "stage3"
    )
    assert len(found) == 7
    meant = [
        "zero=stage3",
        "optimizer.lr",
        "your own are below user: user.foo=1",
        "train.steps",
        "whole number",
        "none, cpu, nvme",
        "zero=stage3",
    ]
    for fault, words in zip(found, meant, strict=True):
        assert words in fault


@pytest.mark.parametrize(
    "override, meant",
    [
        ("zero=3", "zero=stage3"),
        ("zero=nvme", "offload=nvme"),
        ("model=my_net.Net", "write model._target_=my_net.Net"),
        ("data=../texts", "write data.path=../texts"),
        ("model=/my/llama", "write model=hf model.path=/my/llama"),
        ("zeros=stage1", "zero"),
        ("offload.param=cpu", "offload.parameters"),
        ("gradient_accumulation_steps=2", "train.accumulation_steps"),
        ("bf16=true", "precision=bf16"),
        ("experiment=smoek", "experiment=smoke"),
        ("+zero=stage1", "write zero="),
        ("~zero", "write zero="),
        ("+train.steps=1", "write train.steps=1"),
        ("~train.steps", "cannot be removed"),
        (
            "reference=frozen",
            "write its keys one by one, reference.KEY=value; did you mean kl.reference, dpo.reference",
        ),
        ("train=5", "write its keys one by one, train.KEY=value"),
        ("zero@foo=stage1", "write zero=stage1"),
        ("train.steps=1.5", "whole number"),
        ("model.tie_embeddings=perhaps", "true or false"),
        ("optimizer.betas=0.9", "list of numbers"),
        ("train.steps=1,2", "add -m"),
        ("zero=stage1,stage2", "add -m"),
        ("output_dir=/x", "hydra.run.dir=FOLDER"),
    ],
)
def test_errors_of_wrong_names_and_values_name_the_right_ones(override, meant):
    (fault,) = faults(override)
    assert meant in fault


def test_whole_numbers_may_be_written_as_powers_of_ten():
    assert composed("zero.bucket_size=5e8").zero.bucket_size == 500_000_000


@pytest.mark.parametrize(
    "overrides, fix",
    [
        (("zero=stage2", "offload=cpu", "offload.parameters=cpu"), "use zero=stage3, or offload.parameters=none"),
        (("zero=ddp", "offload=cpu"), "offload=none"),
        (("zero=fsdp2", "offload=nvme"), "offload=none"),
        (("zero=ddp", "optimizer=lion"), "optimizer=adamw"),
        (("zero=fsdp2", "optimizer=muon"), "use zero=stage0 to stage3"),
        (("optimizer=lamb", "topology.tensor=2"), "use topology.tensor=1"),
        (("optimizer=lamb", "topology.expert=2", "model=tiny_moe"), "use topology.expert=1"),
        (("optimizer=muon", "optimizer.adam_names='('"), "not a regular expression"),
        (("optimizer=muon", "optimizer.momentum=0"), "optimizer.nesterov=false"),
        (("zero=ddp", "checkpoint.every=5"), "leave out checkpoint.every"),
        (("zero.stage=3",), "choose zero=stage3"),
        (("offload.optimizer=nvme",), "choose offload=nvme"),
        (("zero=stage3", "zero.hpz_partition_size=3"), "use zero.hpz_partition_size=2"),
        (("zero=stage1", "zero.quantized_gradients=true"), "zero=stage2 or zero=stage3"),
        (("topology=tp4",), "use topology.tensor=3 or less"),
        (("topology=tp2", "launch.ranks=3"), "use launch.ranks=2 or a multiple of it"),
        (("topology=tp2", "topology.data=3", "launch.ranks=4"), "use launch.ranks=6"),
        (("topology=tp2", "zero=ddp"), "use topology=dp, or"),
        (("topology.expert=2", "model=tiny_moe", "zero=ddp"), "leave out topology.expert"),
        (
            ("topology=cp2", "model=tiny_moe", "data.seq_len=30"),
            "padding would be routed to experts; use data.seq_len=32",
        ),
        (("topology=cp2", "task=sft", "data=chat"), "use topology.context=1 and topology.sequence"),
        (("topology=cp2", "zero=ddp"), "is there to compare with and data-parallel only"),
        (("topology=sp4",), "use topology.sequence=2, or another degree"),
        (("topology=sp2", "data.seq_len=129"), "use data.seq_len=130"),
        (("topology=tp2", "topology.sequence_parallel=true", "data.seq_len=129"), "use data.seq_len=130"),
        (("topology.sequence_parallel=true",), "topology.tensor above 1"),
        (("topology.data=0",), "must be 1 or more"),
        (("topology.pipeline=8",), "use topology.pipeline=6 or a model with more layers"),
        (("topology=pp2", "topology.schedule=interleaved", "train.accumulation_steps=3"), "train.accumulation_steps=4"),
        (("topology=pp2", "topology.schedule=interleaved"), "use train.accumulation_steps=2"),
        (
            ("topology=pp2", "topology.schedule=interleaved", "train.global_batch_size=24"),
            "use train.micro_batch_size=6",
        ),
        (
            ("topology=pp2", "topology.partition=layers"),
            "must be uniform, parameters, products, type:PATTERN or profile",
        ),
        (("topology=pp2", "topology.partition=type:*"), "not a regular expression"),
        (("topology=pp2", "topology.virtual_stages=2", "train.accumulation_steps=2"), "topology.schedule=interleaved"),
        (("topology.schedule=gpipe",), "topology.pipeline above 1"),
        (("topology=ep2",), "use topology.expert=1, or model=tiny_moe"),
        (("topology=ep4", "model=tiny_moe", "model.experts=6"), "use topology.expert=3, or model.experts=8"),
        (("topology=ep2", "model=tiny_moe", "launch.ranks=3"), "use launch.ranks=2 or a multiple of it"),
        (("model=tiny_moe", "zero=ddp"), "use zero=stage0 to stage3, or model=tiny"),
        (("model=tiny_moe", "model.experts_per_token=9"), "use model.experts_per_token=8"),
        (("model=tiny_moe", "model.experts_every=5"), "use model.experts_every=4"),
        (("model.experts=8",), "choose model=tiny_moe"),
        (("model.dim=100",), "use model.dim=96"),
        (("model.kv_heads=4",), "use model.kv_heads=6"),
        (("model.vocab_size=100",), "use model.vocab_size=256"),
        (("data.seq_len=4096",), "use data.seq_len=1024"),
        (("data.path=/no/such/text",), "no such file"),
        (("data=files",), "use data.path=FOLDER"),
        (("train.steps=0",), "1 or more"),
        (("train.z_loss=-1",), "0 or more"),
        (("ema.decay=1",), "below 1"),
        (("train.evaluate=ema",), "use ema.decay=0.999"),
        (("ema.decay=0.9", "ema.every=21", "train.steps=20"), "use ema.every=1"),
        (("train.max_seconds=0",), "above 0"),
        (("train.until_loss=2", "train.eval_every=0", "train.steps=40"), "use train.eval_every=4"),
        (("train.steps=20", "checkpoint=none", "checkpoint.every=21"), "use checkpoint.every=20"),
        (("train.steps=20", "scheduler.warmup_steps=20"), "use scheduler.warmup_steps=2"),
        (("data.validation_fraction=0",), "use data.validation_fraction=0.05"),
        (("checkpoint.resume=/no/such/run",), "no such folder"),
        (("offload=nvme", "offload.buffer_bytes=5000"), "use offload.buffer_bytes=8192"),
        (("offload=nvme", "offload.buffer_count=2"), "3 or more"),
        (("offload=nvme", "offload.nvme_path=/dev/null/x"), "offload=cpu"),
        (("kernels=triton",), "use kernels=auto"),
        (("launch.device=cuda",), "use launch.device=cpu"),
        (("optimizer=sgd", "optimizer.nesterov=true", "optimizer.momentum=0"), "use optimizer.momentum=0.9"),
        (("optimizer.betas=[0.9,1.0]",), "below 1"),
        (("optimizer.states=8bit", "precision=fp32"), "use precision=bf16"),
        (("optimizer.states=8bit", "precision.master=fp32"), "use precision.master=stochastic"),
        (("precision.master=stochastic",), "use optimizer.states=bf16"),
        (
            ("precision=fp8", "zero=fsdp2"),
            "has no float8 products; use zero=stage0 to stage3",
        ),
        (("precision=fp8", "zero=stage3", "zero.quantized_weights=true"), "leave zero.quantized_weights out"),
        (("precision=fp32", "precision.float8=rowwise"), "precision=bf16 or precision=fp8"),
        (("optimizer.states=8bit", "ema.decay=0.9"), "use ema.decay=null"),
        (("optimizer.states=bf16", "zero=fsdp2"), "use zero=stage0 to stage3"),
        (("precision=fp16", "precision.loss_scale.floor=1e9"), "use precision.loss_scale.floor=65536"),
        (("train.log_every=4", "logger.every=6"), "use logger.every=8"),
        (("scheduler=one_cycle", "scheduler.decay_rate=1"), "set both or neither"),
        (("scheduler=wsd", "scheduler.decay_shape=exponential", "scheduler.final=0"), "use scheduler.final=0.1"),
        (("scheduler=wsd", "train.steps=20", "scheduler.decay_steps=20"), "use scheduler.decay_steps=19"),
    ],
)
def test_what_does_not_fit_together_names_the_fix(overrides, fix):
    assert any(fix in fault for fault in faults(*overrides))
    for advice in re.findall(r"[a-z_.]+=[a-z0-9_.]+", fix):
        followed = [override for override in overrides if not override.startswith(advice.partition("=")[0] + "=")]
        try:
            composed(*followed, advice)
        except ConfigError as refused:  # for something else
            assert not any(fix in fault for fault in refused.faults)


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("train.steps=1e308", "at most 16777216"),
        ("train.steps=9999999999999999999999", "at most 16777216"),
        ("train.steps=\u0661\u0660", "digits 0 to 9"),
        ("optimizer.lr=\u0661.5", "digits 0 to 9"),
        ("optimizer.betas=[0.9,\u0660.5]", "digits 0 to 9"),
        ("optimizer.lr=1e308", "also in float32, where it becomes inf"),
        ("optimizer.lr=inf", "must be 0 or more and finite"),
        ("optimizer.lr=nan", "must be 0 or more and finite"),
        ("optimizer.eps=inf", "must be above 0 and finite"),
        ("hardware.curves={product: [[1,2]]}", "must be a table in an option file or null"),
        ("optimizer.eps=1e308", "also in float32"),
        ("optimizer.weight_decay=1e308", "also in float32"),
        ("optimizer.clip_grad_norm=1e308", "also in float32"),
        ("optimizer.clip_grad_norm=1e-300", "also in float32, where it becomes 0"),
        (
            "optimizer.betas=[0.9,0.999999999]",
            "number 2 must be 0 or more and below 1, also in float32, where it becomes 1",
        ),
        ("zero.bucket_size=1e308", "at most 9223372036854775807"),
        ("model.dim=1e300", "at most 2147483647"),
        ("train.seed=1e300", "at most 9223372036854775807"),
        ("launch.timeout_seconds=inf", "at most 31536000"),
        ("launch.timeout_seconds=1e308", "at most 31536000"),
        ("launch.threads=100000", "at most 4096"),
        ("launch.ranks=1e9", "at most 65536"),
        ("task.module=../../x", "task.module=ztk.experiments.pretrain"),
        ("task.module=experiments/pretrain.py", "task.module=ztk.experiments.pretrain"),
    ],
)
def test_numbers_and_names_without_sense_are_refused(override, reason):
    key = override.partition("=")[0]
    assert any(fault.startswith(f"{key}=") and reason in fault and len(fault) < 200 for fault in faults(override))


def test_threads_of_the_disk_are_limited():
    assert any("at most 1024" in fault for fault in faults("offload=nvme", "offload.threads=100000"))


@pytest.mark.parametrize(
    "overrides",
    [
        ("zero=stage2", "zero.prefetch_bucket_size=5"),
        ("zero=ddp", "zero.bucket_size=5"),
        ("offload=cpu", "offload.nvme_path=/tmp"),
        ("offload.buffer_count=4",),
        ("offload=cpu", "offload.pin_memory=true"),
        ("precision.loss_scale.initial=8",),
        ("precision=fp16", "precision.loss_scale.dynamic=false", "precision.loss_scale.window=1000"),
        ("optimizer.momentum=0.9",),
        ("optimizer=lion", "optimizer.eps=1e-8"),
        ("optimizer.ns_steps=4",),
        ("optimizer=sgd", "optimizer.adam_lr=0.1"),
        ("optimizer=lion", "optimizer.states=bf16"),
        ("optimizer=sgd", "optimizer.betas=[0.9,0.9]"),
        ("scheduler=constant", "scheduler.final=0.1"),
        ("scheduler=one_cycle", "scheduler.warmup_steps=3"),
        ("scheduler=linear", "scheduler.decay_steps=3"),
        ("task=sft", "train.z_loss=1e-4"),
        ("zero=fsdp2", "ema.decay=0.9"),
        ("task=sft", "ema.decay=0.9"),
        ("ema.every=2",),
        ("inference.ema=true",),
        ("task=sft", "train.max_seconds=9"),
        ("data=synthetic", "train.until_loss=2"),
        ("scheduler.warmup_steps=0", "scheduler.warmup_start=0.5"),
        ("data=stdlib", "data.path=/etc/hosts"),
        ("data=synthetic", "data.validation_fraction=0.1"),
        ("checkpoint.keep=3",),
        ("checkpoint.keep_every=4",),
        ("checkpoint=periodic", "data=synthetic", "checkpoint.keep_best=true"),
        ("logger=disabled", "logger.project=mine"),
        ("model.experts_per_token=2",),
    ],
)
def test_what_would_have_no_effect_is_refused(overrides):
    key = overrides[-1].partition("=")[0]
    assert any(fault.startswith(f"{key}=") and "has no effect" in fault for fault in faults(*overrides))


def test_all_faults_come_at_once():
    found = faults(
        "zero=stage1", "zero.max_live_parameters=5", "offload.parameters=nvme", "topology.expert=8", "train.steps=0"
    )
    assert len(found) >= 4


def test_what_an_option_brings_along_and_cannot_act_is_recorded_as_null():
    config = composed("precision=fp16", "precision.loss_scale.dynamic=false")
    assert config.precision.loss_scale.window is None
    assert composed().checkpoint.keep is None
    assert composed("zero=stage3", "zero.stage=1").zero.prefetch_bucket_size is None


def test_a_path_is_enough_to_choose_files():
    config = composed("data.path=[/etc/hosts,/etc]")
    assert config.data.name == "files" and config.data.path == ["/etc/hosts", "/etc"]


def test_ranks_and_threads_follow_the_machine():
    launch = composed().launch
    assert (launch.ranks, launch.threads, launch.device) == (2, 1, "cpu")
    launch = composed(machine=GPU).launch
    assert (launch.ranks, launch.threads, launch.device) == (4, 4, "cuda")
    launch = composed("launch.device=cpu", "launch.ranks=8", machine=GPU).launch
    assert (launch.ranks, launch.threads, launch.device) == (8, 2, "cpu")
    started = composed(machine=Machine(gpus=8, cores=32, started_ranks=16, started_here=8)).launch
    assert (started.ranks, started.threads) == (16, 4)
    assert "use launch.ranks=4" in faults("launch.ranks=5", machine=GPU)[0]


def test_threads_follow_the_environment(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert composed().launch.threads == 3
    assert composed("launch.threads=5").launch.threads == 5


def test_host_memory_is_pinned_only_with_a_gpu():
    assert composed("offload=cpu", machine=GPU).offload.pin_memory is True
    assert composed("offload=cpu", "offload.pin_memory=false", machine=GPU).offload.pin_memory is False
    assert composed("offload=cpu").offload.pin_memory is None


def test_phases_of_the_learning_rate_follow_the_length_of_the_run():
    assert composed("train.steps=400").scheduler.warmup_steps == 20
    assert composed("train.steps=5").scheduler.warmup_steps == 0
    assert composed("scheduler=one_cycle", "train.steps=10").scheduler.rise_steps == 5
    assert composed("scheduler=wsd", "train.steps=50").scheduler.decay_steps == 5
    assert composed("scheduler=wsd", "train.steps=50", "scheduler.total_steps=30").scheduler.decay_steps == 3
    assert composed("scheduler=range_test", "train.steps=50").scheduler.step_size == 5


def test_every_key_of_the_schema_is_settable_by_its_name():
    assert {"train.steps", "optimizer.clip_grad_norm", "checkpoint.resume", "data.path", "launch.ranks"} <= set(
        run_keys()
    )
