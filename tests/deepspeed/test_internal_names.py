"""Names inside DeepSpeed that other projects import, and their effects here."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import ztk.deepspeed as deepspeed
from tests.deepspeed import scripts
from ztk.core.policies.zero import ZeroPolicy
from ztk.deepspeed.names.finder import Finder
from ztk.deepspeed.names.table import GONE, MODULES
from ztk.deepspeed.names.tree import module_of
from ztk.deepspeed.tools import timers
from ztk.deepspeed.version import git_hash

RECORDED = Path(__file__).parents[1] / "checkpoint" / "data" / "deepspeed"
scalers = module_of("deepspeed.runtime.fp16.loss_scaler")
utils = module_of("deepspeed.runtime.utils")
ZeroStageEnum = module_of("deepspeed.runtime.zero.config").ZeroStageEnum
fragment_address = module_of("deepspeed.utils.tensor_fragment").fragment_address


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_types_that_make_deepspeeds_checkpoints_safe_to_load(stage):
    """As scripts do for torch.load: files recorded from DeepSpeed 0.19.8 name these three types."""
    file = RECORDED / f"stage{stage}" / "global_step3" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    allowed = [ZeroStageEnum, scalers.LossScaler, fragment_address]
    with torch.serialization.safe_globals(allowed):
        state = torch.load(file, weights_only=True)["optimizer_state_dict"]
    assert state["zero_stage"] is ZeroStageEnum(stage) and state["zero_stage"] == stage
    assert type(state["loss_scaler"]) is scalers.LossScaler and state["loss_scaler"].loss_scale == 1.0
    if stage < 3:
        addresses = [address for group in state["param_slice_mappings"] for address in group.values()]
        assert addresses and all(type(address) is fragment_address for address in addresses)
        assert addresses[0].start == 0 and addresses[1].start == addresses[0].numel


def test_stages_are_their_numbers():
    assert ZeroStageEnum.weights == 3 and ZeroStageEnum.max_stage is ZeroStageEnum.weights
    assert [ZeroPolicy(stage=stage).shards_gradients for stage in ZeroStageEnum] == [False, False, True, True]


def test_names_that_went_show_the_way():
    for name in (
        "constants",
        "moe.sharded_moe",
        "runtime.constants",
        "runtime.pipe.schedule",
        "runtime.zero.tiling",
        "profiling.flops_profiler",
    ):
        with pytest.raises(ModuleNotFoundError, match="does not offer this module; "):
            Finder().find_spec(f"deepspeed.{name}")
        assert GONE[f"deepspeed.{name}"] and f"deepspeed.{name}" not in MODULES
    with pytest.raises(AttributeError, match="TiledLinear: not offered by ztk; use nn.Linear with topology.tensor"):
        deepspeed.zero.TiledLinear  # noqa: B018
    with pytest.raises(AttributeError, match="comm.log_summary: not offered by ztk; torch.profiler"):
        deepspeed.comm.log_summary  # noqa: B018
    with pytest.raises(AttributeError, match="needs_all_live: not offered by ztk; ztk.plan"):
        deepspeed.zero.estimate_zero3_model_states_mem_needs_all_live  # noqa: B018


def test_words_about_the_build():
    assert deepspeed.__git_hash__ == git_hash == module_of("deepspeed.git_version_info").git_hash
    assert module_of("deepspeed.git_version_info").installed_ops == {}


@pytest.fixture
def clock(monkeypatch):
    """Seconds that the test moves by hand."""
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(time, "perf_counter", lambda: now.seconds)
    return now


def test_timers_add_up_between_start_and_stop(clock, caplog):
    clocks = module_of("deepspeed.utils.timer").SynchronizedWallClockTimer()
    for seconds in (0.5, 0.25):
        clocks("fwd").start()
        clock.seconds += seconds
        clocks("fwd").stop()
        clock.seconds += 7  # not measured
    assert clocks("fwd") is clocks.get_timers()["fwd"] and clocks("fwd").elapsed(reset=False) == 750
    assert clocks.get_mean(["fwd", "bwd"], normalizer=3, reset=False) == {"fwd": 125}
    with caplog.at_level("INFO", logger="ztk.deepspeed"):
        clocks.log(["fwd", "bwd"], normalizer=2, memory_breakdown=True)
    assert "time (ms) | fwd: 375.00 | mem_allocated" in caplog.text and clocks("fwd").elapsed() == 0
    clocks("fwd").start()
    clock.seconds += 1
    assert clocks("fwd").elapsed() == 1000 and clocks("fwd").started_  # it goes on
    with pytest.raises(RuntimeError, match="stop\\(\\) before start"):
        clocks("fwd").start()
    with pytest.raises(RuntimeError, match="'bwd' does not run"):
        clocks("bwd").stop()
    with pytest.raises(ValueError, match="normalizer=0"):
        clocks.get_mean(["fwd"], normalizer=0)
    assert timers.trim_mean([9.0, *[2.0] * 8, 0.0], 0.1) == 2 and timers.trim_mean([], 0.1) == 0


def test_samples_per_second_of_a_scripts_own_loop(clock):
    lines = []
    timer = module_of("deepspeed.utils.timer").ThroughputTimer(
        SimpleNamespace(enabled=True, synchronized=True),
        12,
        steps_per_output=2,
        logging_fn=lines.append,
        monitor_memory=True,
    )
    for step in range(5):
        for micro in range(2):
            timer.start()
            clock.seconds += 10.0 if step < 2 else step - 1  # two steps of warm-up, then 2, 4 and 6 seconds
            timer.stop(global_step=micro == 1)
        if step < 2:
            assert timer.avg_samples_per_sec() == float("-inf")
    assert timer.avg_samples_per_sec() == 12 * 3 / (2 + 4 + 6) and timer.total_elapsed_time == 12
    assert len(lines) == 2 and "vm %" in lines[1]
    assert "micro_step=8/global_step=4, RunningAvgSamplesPerSec=4, CurrSamplesPerSec=3, MemAllocated" in lines[0]
    off = timers.ThroughputTimer(SimpleNamespace(enabled=False, synchronized=True), 12)
    off.start()
    off.stop(global_step=True)
    assert off.global_step_count == 0


def loader_of(*, rank, **changes):
    options = {"batch_size": 2, "pin_memory": False, "local_rank": rank, "tput_timer": None}
    cls = module_of("deepspeed.runtime.dataloader").DeepSpeedDataLoader
    return cls(list(range(10)), data_parallel_world_size=2, data_parallel_rank=rank, **options | changes)


def test_a_loader_of_each_ranks_part():
    started = []
    loaders = [loader_of(rank=0, tput_timer=SimpleNamespace(start=lambda: started.append(1))), loader_of(rank=1)]
    seen = [[batch.tolist() for batch in loader] for loader in loaders]
    assert [len(batch) for batch in seen[0]] == [2, 2, 1] and len(loaders[0]) == len(started) - 1 == 3
    assert sorted(number for part in seen for batch in part for number in batch) == list(range(10))
    assert [batch.tolist() for batch in loaders[1]] == seen[1]  # again, in the same order
    loaders[1].data_sampler.set_epoch(1)
    assert [batch.tolist() for batch in loaders[1]] != seen[1]
    short = loader_of(rank=0, dataloader_drop_last=True, data_sampler=range(5), collate_fn=sum)
    assert list(short) == [1, 5] and len(short) == 2
    assert sum(map(len, loader_of(rank=-1))) == 10
    with pytest.raises(RuntimeError, match="iter\\(loader\\)"):
        next(loader_of(rank=0))
    with pytest.raises(ValueError, match="curriculum_learning"):
        loader_of(rank=0, deepspeed_dataloader_config={"curriculum_learning": True})


def kinds(process, *, stage: int, dtype: str) -> list[str]:
    """Which of DeepSpeed's classes the optimizer is an instance of."""
    config = scripts.config(stage=stage) | ({dtype: {"enabled": True}} if dtype else {})
    engine, optimizer, *_ = deepspeed.initialize(model=scripts.build(), config=config)
    found = [name for name, place in OPTIMIZERS.items() if isinstance(optimizer, getattr(module_of(place), name))]
    engine.destroy()
    return found


OPTIMIZERS = {
    "DeepSpeedOptimizer": "deepspeed.runtime.base_optimizer",
    "ZeROOptimizer": "deepspeed.runtime.base_optimizer",
    "DeepSpeedZeroOptimizer": "deepspeed.runtime.zero.stage_1_and_2",
    "DeepSpeedZeroOptimizer_Stage3": "deepspeed.runtime.zero.stage3",
    "BF16_Optimizer": "deepspeed.runtime.bf16_optimizer",
    "FP16_Optimizer": "deepspeed.runtime.fp16.fused_optimizer",
    "FP16_UnfusedOptimizer": "deepspeed.runtime.fp16.unfused_optimizer",
}


@pytest.mark.parametrize(
    ("stage", "dtype", "own"),
    [
        (0, "bf16", ["BF16_Optimizer"]),
        (0, "fp16", ["FP16_Optimizer"]),
        (2, "bf16", ["ZeROOptimizer", "DeepSpeedZeroOptimizer"]),
        (3, "", ["ZeROOptimizer", "DeepSpeedZeroOptimizer_Stage3"]),
    ],
)
def test_optimizers_have_deepspeeds_classes(ranks, stage, dtype, own):
    assert ranks(1).run(kinds, stage=stage, dtype=dtype) == [["DeepSpeedOptimizer", *own]]
    plain = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    assert not any(isinstance(plain, getattr(module_of(place), name)) for name, place in OPTIMIZERS.items())


def test_attributes_by_dotted_names():
    """As DeepSpeed-Chat's LoRA replaces layers."""
    helper = module_of("deepspeed.compression.helper")
    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.nn.ReLU())
    new = torch.nn.Linear(2, 3)
    assert helper.recursive_getattr(model, "0.0") is model[0][0]
    helper.recursive_setattr(model, "0.0", new)
    helper.recursive_setattr(model, "1", new)
    assert model[0][0] is new and model[1] is new


def test_files_by_the_checkpoint_engine(tmp_path):
    """As open-instruct and ArcticTraining import it."""
    engines = module_of("deepspeed.runtime.checkpoint_engine")
    same = module_of("deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine").TorchCheckpointEngine
    engine, info = (
        engines.TorchCheckpointEngine(),
        engines.CheckpointCommitInfo(tag="a", save_dir=str(tmp_path), save_latest=True),
    )
    assert isinstance(engine, same)
    engine.create(info)
    engine.makedirs(tmp_path / "a", exist_ok=True)
    engine.save({"weight": torch.ones(2), "stage": 3}, tmp_path / "a" / "x.pt")
    assert engine.commit(info) and not engine.is_decoupled()
    assert engine.load(tmp_path / "a" / "x.pt", map_location="cpu")["stage"] == 3
    file = RECORDED / "stage3" / "global_step3" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    assert "optimizer_state_dict" in engine.load(file)
    torch.save(Path("x"), tmp_path / "code.pt")
    with pytest.raises(Exception, match="Weights only load failed"):
        engine.load(tmp_path / "code.pt")


def replaced(process, *, stage: int) -> dict:
    """As OpenRLHF saves a model: every layer's full weight on every rank, and back."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "pad_token_id": 0}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "tensor_parallel": {"autotp_size": 2},
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = deepspeed.initialize(
        model=model, config=config | {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
    )
    gather = module_of("deepspeed.module_inject.layers").GatherReplacedLayerParams
    parts = sum(value.numel() for value in engine.module.parameters())
    differing = []
    for name, value in engine.module.named_parameters():
        with gather(value, engine.module, enabled=True):
            if not torch.equal(value.detach(), before[name]):
                differing.append(name)
    with gather(list(engine.module.parameters()), engine.module):
        full = sum(value.numel() for value in engine.module.parameters())
    tokens = torch.ones(2, 8, dtype=torch.long)
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    found = {"differing": differing, "parts": parts, "full": full, "total": sum(v.numel() for v in before.values())}
    found["after"] = sum(value.numel() for value in engine.module.parameters())
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_full_weights_of_divided_layers(ranks, stage):
    for found in ranks(2).run(replaced, stage=stage):
        assert found["differing"] == [] and found["full"] == found["total"]
        assert found["after"] == found["parts"] < found["total"]


def test_optimizers_that_step_by_themselves():
    """LAMB against its formula, Adagrad against torch's."""
    lamb, adagrad = module_of("deepspeed.ops.lamb").FusedLamb, module_of("deepspeed.ops.adagrad").DeepSpeedCPUAdagrad
    weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    weight.grad = torch.tensor([1.0, -1.0])
    lamb(
        [weight], lr=0.1, eps=0.0
    ).step()  # the first update of Adam is a sign times 0.1; sqrt(2) long it would be, 5 is the weight
    corrected = (1 - 0.999) ** 0.5 / (1 - 0.9) * 0.1 / 0.001**0.5  # the averages of one gradient, corrected
    ratio = 5 / (2**0.5 * 0.1 / 0.001**0.5)
    expected = torch.tensor([3.0, 4.0]) - 0.1 * ratio * corrected * torch.tensor([1.0, -1.0])
    torch.testing.assert_close(weight.detach(), expected)
    for make in (adagrad, torch.optim.Adagrad):
        other = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        other.grad = torch.tensor([1.0, -1.0])
        make([other], lr=0.1).step()
        torch.testing.assert_close(other.detach(), torch.tensor([2.9, 4.1]))
    with pytest.raises(ValueError, match="max_grad_norm=1.0"):
        lamb([weight], max_grad_norm=1.0)


def test_small_names(capsys):
    engine = module_of("deepspeed.runtime.engine")
    assert engine.DeepSpeedOptimizerCallable and engine.DeepSpeedSchedulerCallable and engine.MoE
    build = module_of("deepspeed.git_version_info")
    assert build.torch_info["version"] == "0.0" and build.installed_ops == {} and build.accelerator_name == ""
    module_of("deepspeed.utils.logging").print_dist("a word", ranks=[0])
    assert "a word" in capsys.readouterr().out
    assert not module_of("deepspeed.runtime.zero.utils").is_zero_param(torch.nn.Parameter(torch.zeros(1)))


def test_the_command_behind_another_command(monkeypatch):
    from ztk.deepspeed.runner import main, remote

    runner, seen = module_of("deepspeed.launcher.runner"), []
    monkeypatch.setattr(remote, "EXPORT_ENVS", list(remote.EXPORT_ENVS))
    monkeypatch.setattr(runner, "EXPORT_ENVS", [*runner.EXPORT_ENVS, "ARCTIC"])
    monkeypatch.setattr(main, "run", lambda args: seen.append(args) or (3 if "bad" in args else 0))
    runner.main(["--num_gpus", "2", "a.py"])
    with pytest.raises(SystemExit, match="3"):
        runner.main(["bad"])
    assert seen == [["--num_gpus", "2", "a.py"], ["bad"]]
    assert set(remote.exported({"ARCTIC_X": "1", "OTHER": "2"}, files=[])) == {"ARCTIC_X", "PYTHONPATH"}
