"""OpenRLHF's scripts train_sft, train_rm and train_dpo, unchanged, have the recorded losses, gradient norms and weights at every ZeRO stage
and with the DeepSpeed options of its strategy, on a tiny local model in bf16.

    git clone https://github.com/OpenRLHF/OpenRLHF && git -C OpenRLHF checkout 3c3be62
    pip install torchdata
    ZTK_OPENRLHF=OpenRLHF pytest tests/slow/test_openrlhf.py -k "dpo and stage3 and lora"

OpenRLHF is made for GPUs. A folder on PYTHONPATH replaces its calls of torch.cuda, makes its meshes of CPU ranks, and replaces packages that
are imported but not used here (flash_attn, pylatexenc) or only receive logs (wandb).
"""

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from tests.slow.programs import digest_of, run_program

CHECKOUT = os.environ.get("ZTK_OPENRLHF")
COMMON = (
    "--model.model_name_or_path {work}/model --data.dataset {work}/pairs.jsonl --data.max_len 48 --train.batch_size 8 "
    "--train.micro_batch_size 2 --train.max_epochs 2 --adam.lr 1e-3 --lr_warmup_ratio 0 --logger.wandb.key none "
    "--ds.attn_implementation sdpa"
)
PAIRS = "--data.prompt_key question --data.chosen_key good --data.rejected_key bad"
SCRIPTS = {
    "sft": "--data.input_key question --data.output_key good --data.input_template q{{}}a",
    "rm": PAIRS + " --eval.dataset {work}/pairs.jsonl",
    "dpo": PAIRS + " --ref.model_name_or_path {work}/model",
}
SAVED = 8  # steps of an epoch, after which `resumed` begins
OPTIONS = {
    "plain": "",
    "lora": "--ds.lora.rank 4",
    "adam_offload": "--ds.adam_offload",
    "overlap_fp32_gradients": "--ds.overlap_comm --ds.grad_accum_dtype fp32",
    "recomputation": "--model.gradient_checkpointing_enable",
    "resumed": f"--ckpt.save_steps {SAVED} --ckpt.path {{folder}}/ckpt --ckpt.load_enable",
}
FOR_DPO = {"reference_offload": "--ref.offload"}
# Loss and gradient norm of the last of 16 steps; digest of the saved weights. torch 2.13.0+cpu, transformers 5.17.0, torchdata 0.11.0.
RECORDED = {
    "sft": "2.1051374673843384, 3.1924355030059814; 11a9c3d1",
    "rm": "0.08984375, 1.370438575744629; f2ee400b",
    "dpo": "0.2271064966917038, 0.6105479598045349; 2e38130c",
}
RECORDED_LORA = {
    "sft": "3.2160342931747437, 1.4725749492645264; ad2712d1",
    "rm": "0.2783203125, 2.8643081188201904; b5221b66",
    "dpo": "0.5673531293869019, 0.48654690384864807; 4d82870c",
}
STAND_INS = """
import json, os, sys, types
from importlib.machinery import ModuleSpec
if "RANK" in os.environ:
    def stand_in(name, **names):
        module = types.ModuleType(name)
        module.__dict__.update(names)
        module.__spec__ = ModuleSpec(name, None)
        sys.modules[name] = module
        return module
    unused = dict.fromkeys(("index_first_axis", "pad_input", "rearrange", "unpad_input", "all_gather"))
    for name in ("flash_attn", "flash_attn.bert_padding", "flash_attn.utils", "flash_attn.utils.distributed"):
        stand_in(name, __path__=[], **unused)
    stand_in("pylatexenc", latex2text=None)
    passes = lambda *given, **named: None
    stand_in(
        "wandb", api=types.SimpleNamespace(api_key="none"), init=passes, define_metric=passes, finish=passes,
        log=lambda logs: print("logged", json.dumps(logs), flush=True),
    )
    import torch
    import torch.distributed.device_mesh as meshes
    # torch._dynamo refuses one function with two names of torch.
    torch.cuda.set_device, torch.cuda.synchronize = lambda *given: None, lambda *given: None
    torch.cuda.current_device = lambda: "cpu"
    made = meshes.init_device_mesh
    meshes.init_device_mesh = lambda kind, *given, **named: made("cpu", *given, **named)
"""

pytestmark = pytest.mark.skipif(CHECKOUT is None, reason="ZTK_OPENRLHF names no checkout of OpenRLHF")


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    """A folder with the stand-ins, a Llama with a tokenizer of letters, and pairs that all have the same chosen answer."""
    from tests.hf import small

    folder = tmp_path_factory.mktemp("openrlhf")
    (folder / "sitecustomize.py").write_text(STAND_INS)
    small.save_model(folder / "model")
    words = [f"ab{number % 10}c{number * 7 % 10}" for number in range(64)]
    rows = [{"question": word, "good": "xyz", "bad": word[::-1]} for word in words]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize("stage", [0, 2, 3], ids="stage{}".format)
@pytest.mark.parametrize(
    ("script", "option"),
    [(script, option) for script in SCRIPTS for option in (OPTIONS | FOR_DPO if script == "dpo" else OPTIONS)],
)
def test_losses_and_weights(tmp_path, work, script, option, stage):
    saved = tmp_path / "out"
    options = f"{COMMON} {SCRIPTS[script]} {(OPTIONS | FOR_DPO)[option]}".format(work=work, folder=tmp_path).split()
    words = ["--module", f"openrlhf.cli.train_{script}", *options]
    words += ["--ds.zero_stage", str(stage), "--ckpt.output_dir", str(saved)]
    code, text = run_program(*words, cwd=tmp_path, path=(work, Path(CHECKOUT).resolve()))
    if option == "resumed":
        assert code == 0, text[-5000:]
        (tmp_path / "ckpt" / "latest").write_text(f"global_step{SAVED}")
        shutil.rmtree(saved)
        code, text = run_program(*words, cwd=tmp_path, path=(work, Path(CHECKOUT).resolve()))
    logged = re.findall(r'logged (\{"train/[^}]*\})', text)  # after a progress bar without a line feed
    assert code == 0 and logged, text[-5000:]
    last = json.loads(logged[-1])
    found = f"{last['train/loss_mean']}, {last['train/grad_norm']}; {digest_of(saved)}"
    assert found == (RECORDED_LORA if option == "lora" else RECORDED)[script]
