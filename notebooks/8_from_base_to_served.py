# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # From a base model to a served one
#
# **Question.** How much does each stage add, from a model that people use to one that answers a client?
#
# SmolLM2-135M-Instruct is evaluated, fine-tuned, aligned with preferences and with rewards, quantised, exported and served. Three tasks can be
# checked by a program: sums in words ("What is seven plus five?" must be answered by "twelve" and nothing else), a description of a person
# that must be written as JSON by a nested schema (no prompt describes it), and one as JSON with three keys that the prompt names, both with
# the right values. The notebook makes its data from a seed. Held-out prompts are never learnt: no held-out sum is learnt with its numbers
# exchanged, and no held-out person's name is learnt.
#
# `python scripts/get_model.py smollm2` fetches the model; `ZTK_REAL_MODEL` names another place.
#
# **To run it.** `pip install -e ".[dev]"` in ztk's folder, then open this file in Jupyter. It takes more than an hour on two cores,
# and under 90 seconds with `ZTK_NOTEBOOKS=quick` in the environment. `python scripts/build_notebooks.py 8` executes it without Jupyter.
# `config_dir=FOLDER` of `ztk.plan_run`, `ztk.run` and `ztk.sweep` adds options of your own.

# %%
import openai
import story
import torch
import transformers
from charts import FOLDER, Figure, choose, claim, runs_folder
from story import MODEL, Answers, answered, ask, export, preferences, run_once, serving, write_lines

import ztk

SIZES = choose(story.FULL, quick=story.QUICK)
SEED = 0
RUNS = runs_folder("story")
DATA = FOLDER / "story"
TRAIN = (
    "model=hf",
    f"model.path={MODEL}",
    "precision=bf16",
    "launch.ranks=2",
    "launch.threads=1",
    "logger=disabled",
    "optimizer.betas=[0.9,0.95]",
    "scheduler=constant",
    "scheduler.warmup_steps=1",
)


def batch(size):
    """Steps of so many records, half of them per rank, without evaluations."""
    return (
        "train.eval_every=0",
        "data.validation_fraction=0",
        f"train.global_batch_size={size}",
        f"train.micro_batch_size={size // 2}",
    )


learnt_sums, held_sums = story.sums(largest=SIZES.largest, held_out=SIZES.held_sums, seed=SEED)
learnt_people, held_people = story.people(count=SIZES.people, held_out=SIZES.held_people, seed=SEED)
LEARNT = learnt_sums + learnt_people + story.keyed(learnt_people)
HELD_OUT = held_sums + held_people + story.keyed(held_people)
prompts = [{record["messages"][0]["content"] for record in part} for part in (LEARNT, HELD_OUT)]
claim("no prompt is learnt and held out", holds=not prompts[0] & prompts[1])
print(f"{len(learnt_sums)} sums and {len(learnt_people)} persons to learn from, {len(HELD_OUT)} held-out prompts")
print(f"{held_sums[0]['messages'][0]['content']} -> {held_sums[0]['solution']}")
print(f"{held_people[0]['messages'][0]['content']} -> {held_people[0]['solution']}")

# %% [markdown]
# ## The base
#
# All evaluations are greedy answers to the held-out prompts. An answer has the right form if it is a number in words and nothing else, or JSON
# that follows the schema. Intervals are Wilson's, of 95 %.

# %%
found: dict[str, Answers] = {}


def evaluate(name, model, *words):
    """Asks the held-out prompts and prints the shares of answers that are right and that have the right form."""
    found[name] = ask(model, *words, records=HELD_OUT, folder=RUNS / f"ask_{name}")
    for task, share in found[name].right.items():
        print(f"{name:<6} {task:<6} right {share}, form {found[name].formed[task]}")


def grows(task, *, before, after, share="right"):
    """Whether the share of answers that are right, or have the right form, grew by more than both intervals."""
    return getattr(found[after], share)[task].low > getattr(found[before], share)[task].high


evaluate("base", MODEL)
print(repr(found["base"].texts[0]))
print(repr(found["base"].texts[-1]))

# %% [markdown]
# ## Fine-tuning
#
# The sums with their answers are learnt twice: by all parameters, at stage 3 with parameters and states offloaded to main memory, and by
# adapters of rank 8 (LoRA).

# %%
chats = write_lines(answered(learnt_sums), to=DATA / "chats.jsonl")
SFT = ("task=sft", *TRAIN, *batch(SIZES.chats), f"data.path={chats}")
OFFLOADED = ("zero=stage3", "offload=cpu")
FULL = (*SFT, *OFFLOADED, "optimizer.lr=1e-4")
run_once(*FULL, f"train.steps={SIZES.sft_steps}", folder=RUNS / "sft")
run_once(*SFT, "lora=adapter", "optimizer.lr=1e-3", f"train.steps={SIZES.lora_steps}", folder=RUNS / "lora")
evaluate("sft", RUNS / "sft")
evaluate("lora", RUNS / "lora")

# %% [markdown]
# ## Preferences
#
# The tuned model answers sums and descriptions that are to be learnt. Where it is wrong, its answer is the rejected one and the right answer is
# the chosen one. These answers are the first that show the schema.

# %%
asked = learnt_sums[: SIZES.drawn // 2] + learnt_people[: SIZES.drawn // 2]
drawn = ask(RUNS / "sft", records=asked, folder=RUNS / "ask_pairs")
pairs = write_lines(preferences(asked, rejected=drawn.texts), to=DATA / "pairs.jsonl")
DPO = (
    *("task=dpo", *TRAIN, *batch(SIZES.pairs), *OFFLOADED, f"data.path={pairs}"),
    *(f"warm_start.path={RUNS / 'sft'}", "optimizer.lr=5e-5", "dpo.beta=0.5", "dpo.sft_weight=1"),
)
run_once(*DPO, f"train.steps={SIZES.dpo_steps}", folder=RUNS / "dpo")
evaluate("dpo", RUNS / "dpo")

# %% [markdown]
# ## Rewards
#
# GRPO draws answers to prompts of all tasks, two thirds of them for JSON with named keys, which was in no record before. Two functions reward
# the answers: 1 for the right number or object, and less for JSON that parses and for single values. The inference engine draws, and the loss
# is corrected for its rounding.

# %%
part = SIZES.people // 4
asked = write_lines(learnt_sums[:part] + learnt_people[:part] + story.keyed(learnt_people), to=DATA / "prompts.jsonl")
rewards = ",".join(f"{story.__file__}:{name}" for name in ("reward_sum", "reward_object"))
DRAWN = SIZES.prompts * SIZES.group
GRPO = (
    *("task=grpo", *TRAIN, "rollout.task=null", f"data.path={asked}", f"reward.functions=[{rewards}]"),
    *(f"rollout.prompts={SIZES.prompts}", f"rollout.group_size={SIZES.group}", "rollout.max_tokens=40"),
    *(f"train.global_batch_size={DRAWN}", f"train.micro_batch_size={min(16, DRAWN // 4)}", "optimizer.lr=2e-5"),
    *("rollout.engine=generator", "rollout.identity=corrected", "kl.reference=none", "warm_start.steps=0"),
    f"warm_start.path={RUNS / 'dpo'}",
)
grpo = run_once(*GRPO, f"train.steps={SIZES.grpo_steps}", folder=RUNS / "grpo")
evaluate("grpo", RUNS / "grpo")

# %% [markdown]
# ## The same seed twice
#
# The first two steps of each method, run again from the same seed, have the same losses, bit for bit.

# %%
losses = {}
for name, words in {"sft": FULL, "dpo": DPO, "grpo": GRPO}.items():
    again = run_once(*words, "train.steps=2", "checkpoint=none", folder=RUNS / f"again_{name}")
    losses[name] = [found.history["loss"].tolist()[:2] for found in (ztk.load(RUNS / name), again)]
    print(name, *losses[name])

# %% [markdown]
# ## Export
#
# The run becomes a folder for transformers and a GGUF file for llama.cpp.

# %%
folder = export(RUNS / "grpo", "--dtype", "fp32", to=FOLDER / "story" / "exported")
gguf = export(RUNS / "grpo", "--format", "gguf", "--kind", "Q8_0", to=FOLDER / "story" / "exported.gguf")
SERVED = HELD_OUT[:: max(1, len(HELD_OUT) // SIZES.served)][: SIZES.served]
found["folder"] = ask(folder, records=SERVED, folder=RUNS / "ask_folder")
evaluate("gguf", gguf)
tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
module = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
ends = [tokenizer.convert_tokens_to_ids("<|im_end|>"), module.generation_config.eos_token_id]
greedy = []
for record in SERVED:
    tokens = tokenizer.apply_chat_template(
        record["messages"], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = module.generate(**tokens, max_new_tokens=40, do_sample=False, eos_token_id=ends)
    greedy.append(answer[0, tokens["input_ids"].shape[1] :].tolist())

# %% [markdown]
# ## Quantised weights
#
# The exported folder answers with weights of 8 and 4 bits. A short fine-tuning changes weights by less than a step of 4 bits, so rounding
# alone takes most of it back. Calibration with texts that were learnt chooses the steps by the layers' outputs.

# %%
evaluate("int8", folder, "weights=int8")
evaluate("round4", folder, "weights=int4")
learnt = answered(LEARNT)
texts = [
    {"text": tokenizer.apply_chat_template(one["messages"], tokenize=False)}
    for one in story.shuffled(learnt, seed=SEED)
]
calibration = write_lines(texts, to=DATA / "calibration.jsonl")
evaluate("int4", folder, "weights=int4", f"inference.calibration={calibration}")

# %% [markdown]
# ## Served
#
# The OpenAI client asks held-out prompts of a server with the weights of 8 bits.

# %%
with serving(folder, "weights=int8", folder=RUNS / "served") as address:
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
    [model] = client.models.list()
    replies = [
        client.chat.completions.create(model=model.id, messages=record["messages"], max_tokens=40, temperature=0)
        .choices[0]
        .message.content
        for record in SERVED
    ]
for record, reply in zip(SERVED, replies, strict=True):
    print(f"{record['messages'][0]['content']} -> {reply}")

# %%
PANELS = {"sums in words": "sums", "JSON by a schema": "people", "JSON with named keys": "keys"}
STAGES = ["base", "lora", "sft", "dpo", "grpo", "int8", "round4", "int4"]
figure = Figure(
    name="from_base_to_served",
    caption="Share of greedy answers to held-out prompts that are right, and that have the right form, after each stage, with 95 % intervals; "
    "and the bytes of the loaded weights.",
    panels=dict.fromkeys(PANELS, ("", "share")) | {"weights": ("", "MB")},
    found=[grpo],
    from_zero=["weights"],
)
for panel, task in PANELS.items():
    for share in ("right", "formed"):
        shares = [getattr(found[name], share)[task] for name in STAGES]
        figure.shares(range(len(STAGES)), shares=shares, series=share, panel=panel)
    figure.axes(panel).set_xticks(range(len(STAGES)), STAGES, rotation=40)
    figure.axes(panel).set_ylim(-0.05, 1.05)
FORMATS = {"folder": 4.0, "int8": 1.0, "int4": 0.5}
parameters = sum(parameter.numel() for parameter in module.parameters())
figure.predicted(
    range(len(FORMATS)),
    y=[parameters * size / 1e6 for size in FORMATS.values()],
    series="weights",
    panel="weights",
    style="D",
    words="4, 1 and 0.5 bytes per parameter",
)
figure.measured(
    range(len(FORMATS)),
    values=[[found[name].weight_bytes / 1e6] for name in FORMATS],
    series="weights",
    panel="weights",
)
figure.axes("weights").set_xticks(range(len(FORMATS)), ["fp32", "int8", "int4"])
figure.done()

# %% [markdown]
# ## Claims

# %%
for name, method in {"sft": "full fine-tuning", "lora": "adapters"}.items():
    claim(f"{method}: answers get the form of sums", holds=grows("sums", before="base", after=name, share="formed"))
    claim(f"{method}: answers get right", holds=grows("sums", before="base", after=name), full_only=True)
claim("preferences teach the schema", holds=grows("people", before="sft", after="dpo", share="formed"))
claim("rewards improve JSON with named keys", holds=grows("keys", before="dpo", after="grpo"), full_only=True)
claim("rewards keep the schema", holds=grows("people", before="base", after="grpo", share="formed"))
claim("the same seed has the same losses", holds=all(one == other for one, other in losses.values()))
texts = [found["grpo"].texts[HELD_OUT.index(one)] for one in SERVED]
claim("the exported folder answers as the run", holds=found["folder"].texts == texts)
claim("transformers answers as ztk, token by token", holds=greedy == found["folder"].tokens)
for name in ("gguf", "int8"):
    for task in ("sums", "people"):
        claim(
            f"{name} keeps the form of {task} that the base lacks",
            holds=grows(task, before="base", after=name, share="formed"),
        )
claim("calibration keeps the form of sums in int4", holds=grows("sums", before="round4", after="int4", share="formed"))
claim(
    "the server answers as task=generate", holds=replies == [found["int8"].texts[HELD_OUT.index(one)] for one in SERVED]
)
