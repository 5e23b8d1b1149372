"""`task=generate`, `task=serve` and `task=eval` do not train: keys without effect there are refused with the fix."""

import json

import pytest

from tests.config.test_config import composed, faults
from ztk.config import answering
from ztk.core.policies.machine import Machine

GENERATE = ("task=generate", "inference.model={folder}", "inference.prompts={file}")


@pytest.fixture
def words(tmp_path):
    return [word.format(folder=tmp_path, file=__file__) for word in GENERATE]


def test_it_runs_on_one_rank_of_the_cpu(words):
    config = composed(*words)
    assert (
        (config.launch.ranks, config.launch.device) == (1, "cpu")
        and config.sampling.temperature == 0.8
        and config.serve.port is None
    )


def test_ranks_share_layers(words):
    config = composed(*words, "topology=tp2")
    assert (config.launch.ranks, config.topology.tensor) == (2, 2)
    assert composed(*words, "topology=tp2", "offload=nvme").offload.optimizer == "nvme"


@pytest.mark.parametrize(
    "more, message",
    [
        (
            "zero=stage3",
            "zero has no effect with task=generate, which answers prompts and trains nothing: leave it out",
        ),
        ("optimizer.lr=0.1", "optimizer.lr=0.1 has no effect with task=generate"),
        (
            "launch.ranks=2",
            "launch.ranks=2: task=generate runs on topology.tensor=1 ranks; leave it out, or use topology.tensor=2",
        ),
        ("topology=dp", "topology has no effect with task=generate"),
        ("topology=tp2_pp2", "topology.pipeline=2: task=generate cuts layers between ranks, and nothing else"),
        ("weights=bf16", "inference.weights=bf16 is for GPUs"),
        ("inference.exact=false", "inference.exact=false is for GPUs"),
        ("inference.cache=blocks", "inference.cache"),
        ("sampling.temperature=-1", "sampling.temperature=-1.0: must be 0, or 1e-06 or more"),
        ("inference.model=/nowhere", "inference.model=/nowhere: no such folder"),
        ("inference.prompts=/nowhere", "inference.prompts=/nowhere: is no file"),
        (
            "inference.adapters={x: /nowhere}",
            "inference.adapters.x=/nowhere: is no folder; name one that peft has saved",
        ),
        (
            "inference.adapters=[/tmp]",
            "inference.adapters=[/tmp]: must name a folder for each adapter; use inference.adapters={NAME",
        ),
        ("inference.held_out=/nowhere", "inference.held_out=/nowhere: is no file"),
        (f"inference.held_out={__file__}", "has no effect with weights as stored: add weights=int8 or weights=int4"),
        ("serve.port=1", "serve.port=1 has no effect here, only with task=serve"),
    ],
)
def test_what_cannot_act_is_refused(words, more, message):
    assert any(message in fault for fault in faults(*words, more))


def test_a_plan_gives_the_cache_its_memory(words):
    assert composed(*words, "inference.cache_tokens=640").inference.cache_tokens == 640
    assert any(
        "inference.cache_tokens=640: with layers that stream the plan gives the cache its memory" in fault
        for fault in faults(*words, "inference.cache_tokens=640", "offload=nvme")
    )


def test_a_gpu_answers_where_it_can(words):
    """A GPU, or one for each rank that shares the layers."""
    own = composed(*words, "weights=fp8", "inference.cache_dtype=fp8", "inference.exact=false")
    assert (own.launch.device, own.inference.cache_dtype, own.inference.exact) == ("cpu", "fp8", False)
    for option in ("weights=fp8", "inference.cache_dtype=fp8"):
        assert any("with offload=nvme: " in fault for fault in faults(*words, option, "offload=nvme"))

    one, two = Machine(gpus=1, cores=2), Machine(gpus=2, cores=2)
    assert composed(*words, "weights=bf16", machine=one).launch.device == "cuda"
    kept = [word for word in words if word.startswith("inference.model")]
    message = "topology.tensor=2 with 1 GPU: each rank needs its own; add launch.device=cpu, or leave"
    for task in ("serve", "generate", "eval"):
        own = (f"task={task}", *kept, "topology=tp2", *([f"eval.path={__file__}"] if task == "eval" else []))
        assert composed(*own, "launch.device=cpu", machine=one).launch.device == "cpu"
        assert composed(*own).launch.device == "cpu"  # of a machine without a GPU
        assert any(message in fault for fault in faults(*own, machine=one)), own
    shared = composed(*words, "topology=tp2", machine=two)
    assert (shared.launch.device, shared.launch.ranks or shared.topology.tensor) == ("cuda", 2)
    for tier in ("nvme", "cpu"):
        streams = (*words, f"offload={tier}", "inference.memory_bytes=1e9")
        own = composed(*streams, machine=one)
        assert (own.launch.device, own.offload.optimizer, own.inference.memory_bytes) == ("cuda", tier, 10**9)
    assert any("offload=cpu would save no memory" in fault for fault in faults(*words, "offload=cpu"))


def test_a_packed_model_is_read_where_it_is(tmp_path):
    words = ("task=serve", f"inference.model={tmp_path}", "offload=nvme", f"offload.nvme_path={tmp_path}")
    assert composed(*words).offload.nvme_path == str(tmp_path)
    assert composed(*words, "topology=tp2").topology.tensor == 2
    (tmp_path / "packed.json").write_text("{}")
    assert any("packed folders have full layers" in fault for fault in faults(*words, "topology=tp2"))
    assert any("which is packed and read where it is" in fault for fault in faults(*words))
    assert composed(*words[:-1]).offload.nvme_path is None


@pytest.mark.parametrize(
    ("kind", "more", "fault"),
    [
        ("cohere", ("offload=nvme",), None),
        ("cohere", ("offload=nvme", "topology=tp2"), "which ranks share on the CPU alone"),
        ("cohere", ("offload=nvme", "topology=tp2", "launch.device=cpu"), None),
        ("cohere", ("topology=tp2", "launch.device=cuda"), "which ranks share on the CPU alone"),
        ("cohere", ("topology=tp2", "launch.device=cpu"), None),
        ("llama", ("topology=tp2", "offload=nvme"), None),
    ],
)
def test_models_that_run_their_own_modules(tmp_path, kind, more, fault):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    words, machine = (f"inference.model={tmp_path}", "inference.prompts=p.jsonl"), Machine(gpus=2, cores=2)
    found = faults("task=generate", *words, *more, machine=machine)
    assert any(fault in line for line in found) if fault else not any("own modules" in line for line in found)


def test_a_server_needs_its_packages(monkeypatch):
    monkeypatch.setattr(answering, "find_spec", lambda name: None if name == "uvicorn" else object())
    assert any('task=serve: needs uvicorn: pip install "ztk[serve]"' in fault for fault in faults("task=serve"))


def test_a_model_is_needed():
    assert any("inference.model must have a value" in fault for fault in faults("task=serve"))


def test_other_tasks_refuse_its_keys():
    assert any(
        "sampling.top_p=0.5 has no effect here, only with task=generate or task=serve" in fault
        for fault in faults("sampling.top_p=0.5")
    )


def test_weights_have_a_format(words):
    config = composed(*words, "weights=int4", f"inference.held_out={__file__}")
    assert config.inference.weights == "int4" and config.inference.held_out == __file__
    assert composed(*words).inference.weights == "stored"
    assert any("int2" in fault for fault in faults(*words, "inference.weights=int2"))


def test_weights_of_a_model_that_trains_are_refused():
    assert any(
        "weights=int8 has no effect with task=pretrain: use task=generate, task=serve or task=eval" in fault
        for fault in faults("weights=int8")
    )


EVAL = ("task=eval", "inference.model={folder}", "eval.path={file}", "eval.choices=[{file},{file}]")


@pytest.fixture
def eval_words(tmp_path):
    return [word.format(folder=tmp_path, file=__file__) for word in EVAL]


def test_files_to_score_are_lists(eval_words):
    config = composed(*eval_words, "eval.seq_len=128", "weights=int8")
    assert config.eval.path == [__file__] and config.eval.choices == [__file__, __file__]
    assert (config.launch.ranks, config.launch.device, config.inference.weights) == (1, "cpu", "int8")
    assert config.sampling.temperature is None and config.inference.lookup_tokens is None


@pytest.mark.parametrize(
    "more, message",
    [
        (
            "optimizer=lion",
            "optimizer has no effect with task=eval, which scores texts and trains nothing: leave it out",
        ),
        ("zero=stage3", "is neither a run folder, nor a checkpoint below one, nor a folder with a config.json"),
        (
            "sampling.temperature=1",
            "sampling.temperature=1.0 has no effect here, only with task=generate or task=serve",
        ),
        ("inference.lookup_tokens=1", "inference.lookup_tokens=1 has no effect here, only with task=generate"),
        ("inference.held_out=x", "inference.held_out=x has no effect here, only with task=generate"),
        ("inference.model=/nowhere", "inference.model=/nowhere: no such folder"),
        ("eval.path=/nowhere", "eval.path=/nowhere: is no file; name a text, jsonl or parquet file"),
        ("eval.choices=[/nowhere]", "eval.choices=/nowhere: is no file; name a jsonl file"),
        ("eval.choices=[]", "eval.choices=[]: names no file"),
        ("eval.seq_len=1", "eval.seq_len=1: must be 2 or more"),
        ("eval.stride=0", "eval.stride=0: must be 1 or more"),
        ("eval.engine=inference launch.ranks=2", "launch.ranks=2: task=eval runs on topology.tensor=1 ranks"),
        (
            "eval.engine=inference zero=stage3",
            "zero has no effect with task=eval, which scores texts and trains nothing",
        ),
    ],
)
def test_what_cannot_act_on_a_score_is_refused(eval_words, more, message):
    assert any(message in fault for fault in faults(*eval_words, *more.split()))


def test_a_stride_leaves_something_before_a_token(eval_words):
    found = faults(*eval_words, "eval.seq_len=64", "eval.stride=64")
    assert any("eval.stride=64: must be below eval.seq_len=64" in fault for fault in found)


def test_something_is_scored(tmp_path):
    assert any("nothing is to be scored" in fault for fault in faults("task=eval", f"inference.model={tmp_path}"))
    found = faults("task=eval", f"inference.model={tmp_path}", f"eval.choices={__file__}", "eval.stride=8")
    assert any("eval.stride=8 has no effect here, only with task=eval and eval.path=FILE" in fault for fault in found)


def test_other_tasks_refuse_files_to_score():
    assert any("has no effect here, only with task=eval" in fault for fault in faults(f"eval.path={__file__}"))


def test_layers_are_streamed_from_files(words):
    config = composed(*words, "offload=nvme", "inference.memory_bytes=1000000000", "offload.threads=2")
    assert (config.offload.optimizer, config.offload.threads, config.offload.buffer_count) == ("nvme", 2, None)
    assert config.offload.nvme_path is None and config.inference.max_sequences is None


@pytest.mark.parametrize(
    "more, message",
    [
        (
            ("offload=cpu",),
            "offload=cpu: answers are computed on the CPU, and offload=cpu would save no memory there",
        ),
        (
            ("inference.memory_bytes=5",),
            "inference.memory_bytes=5 has no effect here, only with task=generate, serve or eval and",
        ),
        (
            ("offload=nvme", "offload.buffer_count=4"),
            "offload.buffer_count=4 has no effect here, only with offload=nvme in a run that trains",
        ),
        (("offload=nvme", "offload.parameters=nvme"), "offload.parameters=nvme has no effect with task=generate"),
        (("offload=nvme", "inference.memory_bytes=0"), "inference.memory_bytes=0: must be 1 or more"),
    ],
)
def test_what_streaming_cannot_do_is_refused(words, more, message):
    assert any(message in fault for fault in faults(*words, *more))


def test_a_logger_that_is_off_is_no_fault(eval_words, words):
    """Scripts add logger=disabled to every command."""
    for line in (eval_words, words):
        composed(*line, "logger=disabled")
        assert faults(*line, "logger=csv")[0].startswith("logger has no effect")
