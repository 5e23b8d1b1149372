"""`task=generate` over a run of ztk and over a folder of transformers."""

import json
import shutil

import pytest
import transformers
from safetensors.torch import load_file, save_file

import ztk
from tests.checkpoint.test_adapters import saved
from tests.commands import run_command
from tests.experiments.test_faults import folder_of, run
from tests.inference.models import VOCABULARY, build, save_letters, save_llama
from tests.inference.test_adapters import merged
from tests.inference.test_own_modules import build_other
from tests.rl.align.ten import save_one
from ztk.checkpoint import read_adapter
from ztk.config import compose
from ztk.core.policies.data import DataName
from ztk.experiments.generate import answer, answering, open_answering, read_prompts, record
from ztk.inference import Generator, InferencePolicy, SamplingParams, open_packed, perplexity
from ztk.report.folder import PACKED
from ztk.serve.models import _of_run, open_model

TRAIN = ("train.steps=2", "launch.ranks=2", "zero=stage3", "checkpoint.every=2")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    done = run(*TRAIN, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder_of(folder)


def test_a_run_answers_a_file(trained, tmp_path):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text(
        '{"prompt": "def f(", "id": 7}\n\n{"tokens": [10, 10], "max_tokens": 3, "n": 2, "temperature": 0}\n'
    )
    out = tmp_path / "out"
    options = (
        "task=generate",
        f"inference.model={trained}",
        f"inference.prompts={prompts}",
        f"hydra.run.dir={out}",
        "sampling.max_tokens=6",
        "sampling.seed=4",
    )
    done = run_command(*options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = (json.loads(line) for line in (out / "completions.jsonl").read_text().splitlines())
    assert first["id"] == 7 and len(first["answers"]) == 1 and len(first["answers"][0]["tokens"]) == 6
    assert [len(answer["tokens"]) for answer in second["answers"]] == [3, 3]
    assert second["answers"][0] == second["answers"][1]
    opened = open_model(str(trained / "checkpoints"))
    sampling = SamplingParams(max_tokens=6, temperature=0.8, seed=4, draw_key=(1,))
    [[answer]] = Generator(opened.module).generate([list(b"def f(")], sampling=sampling)
    assert first["answers"][0]["tokens"] == answer.tokens
    summary = json.loads((out / "summary.json").read_text())
    assert summary["generated_tokens"] == 12 and summary["prompts"] == 2
    [found] = ztk.load(out).runs.to_dict("records")  # as ztk.run returns it
    assert (found["status"], found["steps"], found["generated_tokens"]) == ("done", 0, 12)


def test_the_cost_of_quantised_weights_is_printed(trained, tmp_path):
    prompts, text, out = tmp_path / "p.jsonl", tmp_path / "text.txt", tmp_path / "out"
    prompts.write_text('{"prompt": "def f(", "max_tokens": 2}\n')
    text.write_text("import json\n" * 20)
    options = (
        "task=generate",
        "weights=int4",
        f"inference.model={trained}",
        f"inference.prompts={prompts}",
        f"inference.held_out={text}",
        f"hydra.run.dir={out}",
    )
    done = run_command(*options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads((out / "summary.json").read_text())
    stored, chosen = summary["perplexity_stored"], summary["perplexity"]
    assert f"perplexity of 240 tokens of {text}: {stored:.4f} as stored, {chosen:.4f} with weights=int4" in done.stdout
    assert stored != chosen and abs(chosen / stored - 1) < 0.2
    model = open_model(str(trained / "checkpoints")).module
    tokens = list(b"import json\n" * 20)
    assert stored == perplexity(Generator(model), tokens=tokens)
    assert chosen == perplexity(Generator(model, policy=InferencePolicy(weights="int4")), tokens=tokens)


@pytest.mark.parametrize("is_shared", [False, True])
def test_the_cost_of_weights_is_measured_where_layers_stream(trained, tmp_path, is_shared):
    """Unquantised layers are streamed, too. Their packed folder is removed; the user's folder keeps the chosen format."""
    text, prompts, disk, out = tmp_path / "t.txt", tmp_path / "p.jsonl", tmp_path / "disk", tmp_path / "out"
    text.write_text("import json\n" * 20)
    prompts.write_text('{"prompt": "a", "max_tokens": 1}\n')
    files = (f"inference.model={trained}", f"inference.prompts={prompts}", f"inference.held_out={text}")
    more = ("offload=nvme", "weights=int4", f"offload.nvme_path={disk}", *(["topology=tp2"] if is_shared else []))
    done = run_command("task=generate", *files, *more, f"hydra.run.dir={out}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    summary, module = json.loads((out / "summary.json").read_text()), open_model(str(trained / "checkpoints")).module
    for name, weights in (("perplexity_stored", "stored"), ("perplexity", "int4")):
        policy = InferencePolicy(weights=weights)
        expected = perplexity(Generator(module, policy=policy), tokens=list(b"import json\n" * 20))
        # Cut layers of this size have other groups of inputs, so other int4 weights.
        rel = 0 if not is_shared else 0.2 if weights == "int4" else 1e-4
        assert summary[name] == pytest.approx(expected, rel=rel)
    kept = [open_packed(folder).weights for folder in disk.iterdir()]
    assert kept == ([] if is_shared else ["int4"])


def test_a_model_by_its_own_modules_is_streamed_from_files(tmp_path):
    model = build_other("cohere", num_hidden_layers=5)
    model.save_pretrained(tmp_path / "model")
    save_letters(tmp_path / "model")
    words = ("task=serve", f"inference.model={tmp_path / 'model'}", "offload=nvme", "weights=int8")
    _, generator = open_answering(compose(*words, output_dir=str(tmp_path)))
    greedy = SamplingParams(max_tokens=6, temperature=0)
    in_memory = Generator(model, policy=InferencePolicy(weights="int8"))
    assert (
        generator.generate([[5, 6]], sampling=greedy)[0][0].tokens
        == in_memory.generate([[5, 6]], sampling=greedy)[0][0].tokens
    )
    assert generator.plan is not None
    generator.close()


def test_a_run_streamed_from_files_answers_the_same(trained, tmp_path):
    prompts, out = tmp_path / "p.jsonl", tmp_path / "out"
    prompts.write_text('{"prompt": "def f("}\n{"prompt": "import "}\n')
    options = (
        "task=generate",
        "weights=int8",
        "offload=nvme",
        f"inference.model={trained}",
        f"inference.prompts={prompts}",
        f"hydra.run.dir={out}",
        "sampling.max_tokens=6",
    )
    done = run_command(*options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "plan: " in done.stdout and "tokens/s" in done.stdout
    lines = [json.loads(line) for line in (out / "completions.jsonl").read_text().splitlines()]
    generator = Generator(open_model(str(trained / "checkpoints")).module, policy=InferencePolicy(weights="int8"))
    for number, line in enumerate(lines, start=1):
        sampling = SamplingParams(max_tokens=6, temperature=0.8, draw_key=(number,))
        [[answer]] = generator.generate([list(line["prompt"].encode())], sampling=sampling)
        assert line["answers"][0]["tokens"] == answer.tokens
    summary = json.loads((out / "summary.json").read_text())
    assert summary["planned_tokens_per_second"] > 0 and not (out / PACKED).exists()

    config = compose(*options[:5], "inference.memory_bytes=1000", output_dir=str(tmp_path))
    with pytest.raises(ValueError, match="inference.memory_bytes=1000: 1 sequence"):  # known when the model is packed
        open_answering(config)
    assert not (tmp_path / PACKED).exists()


def test_the_cache_and_its_format_are_chosen_by_keys(trained, tmp_path):
    words = ("task=serve", f"inference.model={trained}", "launch.device=cpu")
    config = compose(*words, "inference.cache_tokens=2048", output_dir=str(tmp_path))
    opened, generator = open_answering(config)
    assert (generator.policy.device, generator.policy.cache_tokens) == ("cpu", 2048)
    greedy, prompts = SamplingParams(max_tokens=6, temperature=0), [list(b"def f("), list(b"import ")]
    assert generator._cache.positions == 2048
    plain = Generator(opened.module).generate(prompts, sampling=greedy)
    found = generator.generate(prompts, sampling=greedy)
    assert [[one.tokens for one in each] for each in found] == [[one.tokens for one in each] for each in plain]

    config = compose(
        *words, "weights=fp8", "inference.cache_dtype=fp8", "inference.exact=false", output_dir=str(tmp_path)
    )
    [[answer]] = open_answering(config)[1].generate(prompts[:1], sampling=greedy)
    assert len(answer.tokens) == 6 and answer.error is None


def test_bad_lines_fail_alone(trained, tmp_path):
    """Each is in the file with its error. The others have their answers, which go on to the end of the context where nothing limits them."""
    file, out = tmp_path / "p.jsonl", tmp_path / "out"
    bad = {
        b"{": "not JSON",
        b'{"text": "x"}': 'has neither a text "prompt"',
        b'{"prompt": "x", "top_p": 7}': "sampling.top_p=7",
        b'{"prompt": "x", "max_token": 7}': "max_token is no key of a prompt: write max_tokens",
        b'{"prompt": "x", "max_new_tokens": 7}': "max_new_tokens has no effect here",
        b'{"prompt": "\\ud83d"}': "is not UTF-8",
        b'{"prompt": "x", "logit_bias": [1]}': "logit_bias must map token ids to numbers",
        b'{"prompt": "x", "stop": [1]}': "must be a text or a list of texts",
        b'{"tokens": [999]}': "token 999 is outside the vocabulary",
        b'{"prompt": "' + b"x" * 500 + b'"}': "a prompt of 500 tokens",
    }
    good = [
        '{"prompt": "a\u2028b", "max_tokens": 3, "id": 1}',
        '{"prompt": "def f(", "temperature": 0}',
        '{"prompt": "def f(", "temperature": 0, "logit_bias": {"120": 100}, "stop": ["xxx"], "max_tokens": 9}',
        '{"prompt": "def f(", "temperature": 0, "logit_bias": {"120": 100}, "stop_token_ids": [120], "max_tokens": 9}',
    ]
    file.write_bytes(b"\n".join([*bad, *(line.encode() for line in good)]) + b"\n")
    words = (f"inference.model={trained}", f"inference.prompts={file}", "inference.max_model_len=64")
    done = run_command("task=generate", *words, f"hydra.run.dir={out}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (
        f"{len(bad)} of {len(bad) + 4} prompts have an error instead of answers, the first: line 1: not JSON"
        in done.stdout
    )
    lines = [json.loads(line) for line in (out / "completions.jsonl").read_text(encoding="utf-8").split("\n")[:-1]]
    for line, said in zip(lines, bad.values(), strict=False):
        assert said in line["error"] and "answers" not in line
    first, second, third, fourth = [line["answers"][0] for line in lines[len(bad) :]]
    assert lines[len(bad)]["prompt"] == "a\u2028b" and lines[len(bad)]["id"] == 1 and len(first["tokens"]) == 3
    assert len(second["tokens"]) == 64 - len("def f(")
    assert third["text"] == "" and third["finish_reason"] == "stop"
    assert fourth["tokens"] == [120] and fourth["text"] == "" and fourth["finish_reason"] == "stop"
    file.write_text("{\n")
    done = run_command("task=generate", *words, f"hydra.run.dir={tmp_path / 'none'}", cwd=tmp_path)
    assert done.returncode == 1 and "no prompt has an answer; line 1: not JSON" in done.stderr


def test_a_folder_with_gaps_in_its_ids(tmp_path):
    """The largest id counts, not the number of entries, so the end token can be drawn. A stop text may be a special token."""
    save_one("bytes, gaps in ids", path=tmp_path / "model")
    config = transformers.LlamaConfig(
        vocab_size=400, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "model")
    opened = open_model(str(tmp_path / "model"))
    ids = opened.tokenizer._tokenizer.get_vocab()
    assert opened.vocabulary == max(ids.values()) + 1 > len(ids)
    assert opened.tokenizer.special[ids["<|im_start|>"]] == "<|im_start|>"
    file = tmp_path / "p.jsonl"
    start = ids["<|im_start|>"]
    file.write_text(json.dumps({"prompt": "a", "logit_bias": {str(start): 100}, "stop": "<|im_start|>"}))
    words = ("task=generate", f"inference.model={tmp_path / 'model'}", f"inference.prompts={file}")
    generator = Generator(opened.module)
    [line] = read_prompts(
        str(file), opened=opened, config=compose(*words, output_dir=str(tmp_path)), generator=generator
    )
    [[answer]] = generator.generate([line.tokens], sampling=[line.sampling])
    written = record(line, answers=[answer], opened=opened)
    assert written["answers"][0] | {"logprobs": []} == {
        "text": "", "tokens": [start], "finish_reason": "stop", "logprobs": []
    }  # fmt: skip


def test_answers_are_drawn_by_the_folders_generation_config(tmp_path):
    """Its length is a bound, not a demand: a prompt near the end of the context is answered as far as there is room."""
    folder = tmp_path / "model"
    save_one("bytes, gaps in ids", path=folder)
    config = transformers.LlamaConfig(
        **{"vocab_size": 400, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1},
        **{"num_attention_heads": 2, "max_position_embeddings": 64},
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    values = {"do_sample": False, "max_new_tokens": 500, "repetition_penalty": 1.3, "eos_token_id": [5, 7]}
    (folder / "generation_config.json").write_text(json.dumps(values))
    opened = open_model(str(folder))
    assert {5, 7} <= set(opened.ends)
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "abc"}\n{"prompt": "abc", "temperature": 0.5, "max_tokens": 500}\n')
    words = ("task=generate", f"inference.model={folder}", f"inference.prompts={file}")
    given = {"opened": opened, "generator": Generator(opened.module)}
    line, too_long = read_prompts(str(file), config=compose(*words, output_dir=str(tmp_path)), **given)
    assert line.sampling.max_tokens == 64 - len(line.tokens)
    assert (line.sampling.temperature, line.sampling.repetition_penalty) == (0.0, 1.3)
    assert "lower max_tokens" in too_long.error


def test_a_folder_that_lacks_weights_is_refused(tmp_path):
    save_llama(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"its files lack model\.layers\.1\.mlp\.up_proj\.weight"):
        open_model(str(tmp_path))


def test_a_folder_of_transformers_opens_with_its_tokenizer(tmp_path):
    model = save_llama(tmp_path)
    opened = open_model(str(tmp_path))
    assert opened.tokenizer.encode("AB") == [32, 33] and set(opened.ends) >= {94} and opened.vocabulary == VOCABULARY
    sampling = SamplingParams(max_tokens=8, temperature=0)
    answers = [
        Generator(module).generate([[5, 6]], sampling=sampling)[0][0].tokens for module in (opened.module, model)
    ]
    assert answers[0] == answers[1]
    with pytest.raises(ValueError, match="no chat template"):
        opened.tokenizer.chat([{"role": "user", "content": "x"}])


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match=str(tmp_path)):
        open_model(str(tmp_path))


def test_messages_are_asked_by_the_models_chat_template(tmp_path):
    folder = tmp_path / "model"
    save_one("bytes, gaps in ids", path=folder)
    config = transformers.LlamaConfig(
        vocab_size=400, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    messages = [{"role": "user", "content": "abc"}]
    file = tmp_path / "p.jsonl"
    file.write_text(f'{json.dumps({"messages": messages})}\n{{"messages": "abc"}}\n')
    opened = open_model(str(folder))
    words = ("task=generate", f"inference.model={folder}", f"inference.prompts={file}")
    given = {"opened": opened, "generator": Generator(opened.module)}
    line, bad = read_prompts(str(file), config=compose(*words, output_dir=str(tmp_path)), **given)
    assert line.tokens == opened.tokenizer.chat(messages)
    assert "must be a list of messages" in bad.error
    # of runs in the folder's tokens: task=sft, and task=grpo with prompts that are messages
    shutil.copytree(folder, tmp_path / "tokenizer")
    config = compose("task=generate", f"inference.model={folder}", output_dir=str(tmp_path))
    config.data.tokenizer, config.data.chat_template = str(folder), "tokenizer"
    for data in (DataName.chat, DataName.prompts):
        config.data.name = data
        run_of = _of_run(tmp_path, name="run", config=config, module=opened.module)
        assert run_of.tokenizer.chat(messages) == line.tokens
    config.data.name = DataName.files
    with pytest.raises(ValueError, match="trained on text and has no chat template"):
        _of_run(tmp_path, name="run", config=config, module=opened.module).tokenizer.chat(messages)


def test_lines_name_adapters_and_a_broken_folder_is_named(tmp_path):
    folder, file = tmp_path / "adapter", tmp_path / "p.jsonl"
    model = save_llama(tmp_path / "model")
    saved(build("llama", tie_word_embeddings=True), folder=folder, target_modules="all-linear")
    lines = [{"tokens": [5, 6], "adapter": "own"}, {"tokens": [5, 6]}, {"tokens": [5, 6], "adapter": "other"}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = (
        "task=generate",
        f"inference.model={tmp_path / 'model'}",
        f"inference.prompts={file}",
        "sampling.max_tokens=4",
    )
    out = tmp_path / "out"
    config = compose(*words, f"inference.adapters={{own: {folder}}}", "sampling.temperature=0", output_dir=str(out))
    assert config.inference.adapters == {"own": str(folder)}
    out.mkdir()
    with answering(config) as found:
        answer(config, answering=found)
    own, base, other = (json.loads(line) for line in (out / "completions.jsonl").read_text().splitlines())
    assert other["error"] == "adapter='other': inference.adapters has own; name one of them, or leave it out"
    for written, plain in ((own, merged(model, adapter=read_adapter(folder))), (base, model)):
        [[wanted]] = Generator(plain).generate([[5, 6]], sampling=SamplingParams(max_tokens=4, temperature=0))
        assert written["answers"][0]["tokens"] == wanted.tokens
        assert written["answers"][0]["logprobs"] == wanted.logprobs.tolist()
    assert own["answers"] != base["answers"]
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(ValueError, match=rf"inference\.adapters\.own={folder}: .* is no JSON"):
        open_answering(config)
