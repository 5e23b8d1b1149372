"""`task=generate` and `task=serve` train nothing: what has no effect there is refused with the fix."""

import pytest

from tests.config.test_config import composed, faults

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


@pytest.mark.parametrize(
    "more, message",
    [
        (
            "zero=stage3",
            "zero has no effect with task=generate, which answers prompts and trains nothing: leave it out",
        ),
        ("optimizer.lr=0.1", "optimizer.lr=0.1 has no effect with task=generate"),
        ("launch.ranks=2", "launch.ranks=2: task=generate runs on one rank"),
        ("launch.device=cuda", "launch.device=cuda: task=generate computes on the CPU"),
        ("sampling.temperature=-1", "sampling.temperature=-1.0: must be 0 or more"),
        ("inference.model=/nowhere", "inference.model=/nowhere: is no folder"),
        ("inference.prompts=/nowhere", "inference.prompts=/nowhere: is no file"),
        ("inference.held_out=/nowhere", "inference.held_out=/nowhere: is no file"),
        (f"inference.held_out={__file__}", "has no effect with weights as stored: add weights=int8 or weights=int4"),
        ("serve.port=1", "serve.port=1 has no effect here, only with task=serve"),
    ],
)
def test_what_cannot_act_is_refused(words, more, message):
    assert any(message in fault for fault in faults(*words, more))


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
        "weights=int8 has no effect with task=pretrain: use task=generate or task=serve" in fault
        for fault in faults("weights=int8")
    )
