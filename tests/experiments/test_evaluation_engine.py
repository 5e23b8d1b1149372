"""`task=eval` by the engine that trains: numbers of one rank at every layout, stage and tier, for folders of transformers and runs of ztk."""

import json

import pytest

from tests.config.test_config import CPU
from tests.experiments.test_evaluate import QUESTIONS, folder, write_folder  # noqa: F401 a fixture
from tests.inference.test_scoring import PER_TOKEN
from tests.parallel.topology.families import make
from tests.serve.test_trained import HF, run  # noqa: F401 a fixture
from ztk.config import ConfigError, compose
from ztk.core.runtime import Process
from ztk.experiments import policies
from ztk.experiments.evaluate import evaluate, main
from ztk.experiments.evaluation_engine import open_scored
from ztk.experiments.evaluation_files import read_questions, read_texts

DOCUMENTS = ["ABCD" * 30, "x", "AB" * 7]


@pytest.fixture
def files(tmp_path):
    """Overrides with the scored files: documents of several windows and of one token, and questions."""
    texts, questions = tmp_path / "t.jsonl", tmp_path / "q.jsonl"
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    questions.write_text("".join(json.dumps(line) + "\n" for line in QUESTIONS))
    return (f"eval.path={texts}", f"eval.choices={questions}", "eval.seq_len=32", "eval.record=true")


def composed(model, out, *words):
    return compose("task=eval", f"inference.model={model}", *words, output_dir=str(out), machine=CPU)


def play(process: Process, *, config) -> None:
    texts = {path: read_texts(path, field="text") for path in config.eval.path}
    questions = {path: read_questions(path) for path in config.eval.choices}
    scored, engine = open_scored(config, process=process.arrange(policies.topology(config)))
    given = {"opened": scored.opened, "scorer": scored.scorer, "speaks": scored.is_first}
    evaluate(config, texts=texts, questions=questions, **given)
    engine.close()


def read(out):
    lines = (out / "examples.jsonl").read_text().splitlines()
    return json.loads((out / "eval.json").read_text())["files"], [json.loads(line) for line in lines]


@pytest.fixture
def scores(ranks, tmp_path):
    """`scores(model, *words)`: the file that the training engine writes."""

    def scored(model, *words):
        out = tmp_path / "scored"
        out.mkdir(exist_ok=True)
        config = composed(model, out, *words)
        ranks(config.launch.ranks).run(play, config=config)
        return read(out)

    return scored


@pytest.fixture
def expected(files, tmp_path):
    """`expected(model)`: the file that the inference engine writes on one rank."""

    def scored(model, *words):
        out = tmp_path / "one_rank"
        main(composed(model, out, *files, *words))
        return read(out)

    return scored


def agree(found, other, *, per_token=PER_TOKEN):
    """Sums of log-probabilities differ by the rounding of their tokens, of which a question here has four at most."""
    (files, lines), (files_then, lines_then) = found, other
    text, text_then = files[0], files_then[0]
    assert text["tokens"] == text_then["tokens"] and text["stride"] == text_then["stride"]
    assert abs(text["bits"] - text_then["bits"]) < per_token * text["tokens"] / 0.69
    assert files[1] == files_then[1]  # accuracies
    for own, then in zip(lines[len(DOCUMENTS) :], lines_then[len(DOCUMENTS) :], strict=True):
        for ours, theirs in zip(own["log_likelihoods"], then["log_likelihoods"], strict=True):
            assert abs(ours - theirs) < 4 * per_token


LAYOUTS = [
    ("zero=stage3", "offload=nvme", "launch.ranks=2"),
    ("topology=tp2", "zero=stage1"),
    ("topology=pp2",),
    ("topology=sp2",),
    ("topology=cp2",),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda words: words[0].partition("=")[2])
def test_a_folder_of_transformers_at_any_layout(folder, layout, files, expected, scores):  # noqa: F811 a fixture
    agree(scores(folder, *files, *layout), expected(folder))


def test_stages_and_tiers_have_the_same_bits(folder, files, scores):  # noqa: F811 a fixture
    found = scores(folder, *files, "zero=stage0", "launch.ranks=2")
    for more in (("zero=stage2",), ("zero=stage3", "offload=cpu"), ("zero=stage3", "offload=nvme")):
        assert scores(folder, *files, *more, "launch.ranks=2") == found


EXPERTS = ("model=tiny_moe", "model.layers=2", "data=synthetic", "data.seq_len=32", "ema.decay=0.5")


def test_a_run_with_experts_and_an_average(run, files, expected, scores):  # noqa: F811 a fixture
    trained = run(*EXPERTS)
    for ema in ((), ("inference.ema=true",)):
        one_rank = expected(trained, *ema)
        agree(scores(trained, *files, "topology=ep2", "zero=stage3", *ema), one_rank)
        agree(scores(trained, *files, "topology=pp2", *ema), one_rank)


def test_experts_of_transformers(tmp_path, files, expected, scores):
    model = write_folder(make("Qwen2Moe", vocab_size=96), path=tmp_path / "moe")
    agree(scores(model, *files, "topology=ep2"), expected(model))


@pytest.mark.parametrize(
    "words, message",
    [
        (("zero=stage0", "topology.tensor=8"), "topology.tensor=8 is more than model.kv_heads=2"),
        (("offload=cpu", "zero=stage1"), "offload=cpu with zero=stage1: without gradients there are parameters alone"),
        (("topology=ep2",), "topology.expert=2 spreads experts"),
        (("zero=ddp",), "zero=ddp is there to compare training with"),
        (("zero=stage3", "weights=int8"), "weights=int8 is a format of the inference engine"),
        (("zero=stage3", "recompute=full"), "recompute has no effect with task=eval"),
        (("topology=pp2", "topology.schedule=gpipe"), "topology.schedule=gpipe orders backwards"),
        (
            ("zero=stage2", "zero.quantized_gradients=true"),
            "zero.quantized_gradients=true has no effect with task=eval",
        ),
    ],
)
def test_what_does_not_fit_the_model_is_refused(folder, files, words, message):  # noqa: F811 a fixture
    with pytest.raises(ConfigError) as caught:
        composed(folder, "/run", *files, *words)
    assert any(message in fault for fault in caught.value.faults), caught.value.faults


def test_the_record_names_the_engine(folder, files):  # noqa: F811 a fixture
    config = composed(folder, "/run", *files, "topology=sp2")
    assert (config.eval.engine, config.precision.dtype, config.launch.ranks) == ("training", "fp32", 2)
    assert config.inference.weights is None and config.model.name == "hf"
    alone = composed(folder, "/run", *files)
    assert (alone.eval.engine, alone.launch.ranks, alone.inference.weights) == ("inference", 1, "stored")
    assert composed(folder, "/run", *files, "topology=tp2").eval.engine == "inference"


def test_a_run_with_adapters_on_their_base(run, tmp_path, files, expected, scores):  # noqa: F811 a fixture
    base = tmp_path / "base"
    make("Llama", vocab_size=256).save_pretrained(base)
    trained = run(*HF, f"model.path={base}", "lora=adapter", "lora.rank=2", "optimizer.lr=0.05")
    agree(scores(trained, *files, "topology=tp2", "zero=stage3"), expected(trained))
