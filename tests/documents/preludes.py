"""The names that a document's block takes for granted: models, data, arguments."""

import argparse
import copy

import torch
from torch import nn
from torch.nn import functional as F

from ztk.core.runtime import Process

VOCABULARY, LENGTH = 64, 16


class Texts(torch.utils.data.Dataset):
    """Token sequences that count upwards in steps of their own: they can be learned."""

    def __init__(self, *, samples: int = 16) -> None:
        starts, steps = torch.arange(samples) * 5, torch.arange(samples) % 3 + 1
        self._tokens = (starts[:, None] + steps[:, None] * torch.arange(LENGTH)) % VOCABULARY

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._tokens[index], "labels": self._tokens[index]}


def tiny_gpt2(process: Process, *, positions: int = LENGTH) -> str:
    """Rank 0 saves a GPT-2 of the hub's class, with two layers of width 32, in the folder `gpt2`."""
    if process.rank == 0:
        _save_gpt2("gpt2", positions=positions)
    process.comm.barrier()
    return "gpt2"


def _save_gpt2(folder: str, *, positions: int) -> None:
    from safetensors.torch import save_model
    from transformers import GPT2Config, GPT2LMHeadModel

    options = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # both runs would have to draw in one order
    shape = {"vocab_size": VOCABULARY, "n_positions": positions, "n_embd": 32, "n_layer": 2, "n_head": 2}
    config = GPT2Config(**shape, **options, bos_token_id=0, eos_token_id=0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config.save_pretrained(folder)
        save_model(GPT2LMHeadModel(config), f"{folder}/model.safetensors", metadata={"format": "pt"})


def gpt2_loop(*, process: Process, epochs: int) -> dict:
    """Document 002, section 5.1: `GPT2LMHeadModel`, `train_dataset`, `num_epochs`."""
    from transformers import GPT2LMHeadModel

    tiny_gpt2(process)
    return {"GPT2LMHeadModel": GPT2LMHeadModel, "train_dataset": Texts(), "num_epochs": epochs}


def hub(*, process: Process, positions: int) -> dict:
    """A folder with the hub's name."""
    tiny_gpt2(process, positions=positions)
    return {}


class MyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(28, 32), nn.ReLU())
        self.weight = nn.Parameter(torch.randn(10, 32) / 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.body(x), self.weight)


def my_model(*, process: Process, zero_stage: int = 0) -> dict:
    """`MyModel`, `args`, and a step to repeat."""

    def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(8, 28, generator=torch.Generator().manual_seed(step % 2))
        x = x.chunk(process.world_size)[process.rank]
        return x, x[:, :10].argmax(1)

    def train(engine, *, steps: int) -> None:
        for step in range(steps):
            x, y = data(step)
            engine.backward(F.cross_entropy(engine(x).float(), y))
            engine.step()

    return {
        "MyModel": MyModel,
        "args": argparse.Namespace(zero_stage=zero_stage),
        "torch": torch,
        "nn": nn,
        "F": F,
        "train": train,
    }


class Attention(nn.Module):
    """Causal attention with one head: the `self.attention` of document 002, section 8."""

    def __init__(self, width: int) -> None:
        super().__init__()
        # Without biases: a key's has the gradient zero but for rounding, which AdamW would blow up.
        self.mix, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (part.unsqueeze(1) for part in self.mix(x).chunk(3, dim=-1))
        return self.out(F.scaled_dot_product_attention(query, key, value, is_causal=True).squeeze(1))


class Layer(nn.Module):
    """The parts of a layer of section 8."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width)


class Layered(nn.Module):
    """A model of such layers, called as the one of section 5.1."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.layers = nn.ModuleList(kind() for _ in range(4))
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> argparse.Namespace:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x).float()
        return argparse.Namespace(loss=F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()))


def layers(*, process: Process) -> dict:
    """Section 8: the block's class is derived from `Layer`; then section 5.1's loop trains a model of it."""
    return {"nn": nn, "torch": torch, "Layer": Layer, "Layered": Layered, "train_dataset": Texts(), "num_epochs": 4}


def accelerate_loop(*, process: Process, samples: int, micro_batch: int) -> dict:
    """Section 5.4: `model`, `optimizer`, `train_dataloader`."""
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel.from_pretrained(tiny_gpt2(process))
    loader = torch.utils.data.DataLoader(Texts(samples=samples), batch_size=micro_batch)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2), "train_dataloader": loader}


def trainer(*, process: Process, samples: int) -> dict:
    """Section 5.3: `model`, `train_dataset`, `eval_dataset`."""
    from transformers import GPT2LMHeadModel

    data = Texts(samples=samples)
    return {"model": GPT2LMHeadModel.from_pretrained(tiny_gpt2(process)), "train_dataset": data, "eval_dataset": data}


def llama_and_texts(*, process: Process) -> dict:
    """Section 12.1: a Llama and its tokenizer in the folder `llama`, and `alpaca.json`, from rank 0."""
    if process.rank == 0:
        _save_llama_and_texts()
    process.comm.barrier()
    return {}


def _tiny_llama(process: Process) -> tuple:
    """The Llama of section 12.1 and its tokenizer, padded by the token that ends a text, as in the document."""
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    llama_and_texts(process=process)
    tokenizer = PreTrainedTokenizerFast.from_pretrained("llama")
    tokenizer.pad_token = tokenizer.eos_token
    return LlamaForCausalLM.from_pretrained("llama"), tokenizer


def preferences(*, process: Process, pairs: int) -> dict:
    """Section 11.3: `sft_model`, `tokenizer`, and right-padded pairs whose chosen answer counts upwards."""
    sft_model, tokenizer = _tiny_llama(process)
    starts = torch.arange(pairs) * 3 % 30 + 7
    chosen = starts[:, None] + torch.arange(8)
    rejected = torch.where(torch.arange(8) < 3, chosen, chosen.flip(1))
    for row, length in enumerate(torch.arange(pairs) % 4 + 5):
        chosen[row, length:], rejected[row, length - 1 :] = tokenizer.pad_token_id, tokenizer.pad_token_id
    mine = slice(process.rank, None, process.world_size)
    return {
        "torch": torch,
        "sft_model": sft_model,
        "tokenizer": tokenizer,
        "chosen": chosen[mine],
        "rejected": rejected[mine],
    }


def four_models(*, process: Process, configs: dict[str, dict], epochs: int) -> dict:
    """Section 11.4: `rlhf_engine` of four engines with a configuration each, `args`, `prompt_dataloader`; prompts are padded in front."""
    import deepspeed
    from deepspeed_chat.reward_model import RewardModel

    first, tokenizer = _tiny_llama(process)
    models = {}
    for name in ("ref", "reward", "critic", "actor"):
        torch.manual_seed(1)
        model = copy.deepcopy(first)
        models[name] = model if name in ("ref", "actor") else RewardModel(model, tokenizer)
        if name == "reward":
            models[name].v_head.weight.data.mul_(20)  # so that rewards differ
    engines = {name: deepspeed.initialize(model=model, config=configs[name])[0] for name, model in models.items()}
    prompts = torch.arange(8)[:, None] * 3 % 20 + 7 + torch.arange(4)
    prompts[1::2, :2] = tokenizer.pad_token_id
    rows = [{"input_ids": row} for row in prompts[process.rank :: process.world_size]]
    torch.manual_seed(process.rank)
    return {
        "rlhf_engine": argparse.Namespace(**engines, tokenizer=tokenizer),
        "args": argparse.Namespace(num_train_epochs=epochs, max_answer_seq_len=6),
        "prompt_dataloader": torch.utils.data.DataLoader(rows, batch_size=2),
    }


def inference(*, process: Process, loads: bool = True) -> dict:
    """Section 10: the Llama of section 12.1 in the folder `llama`, loaded as `model` where the block does not do it itself."""
    llama_and_texts(process=process)
    if not loads:
        return {"torch": torch}
    import deepspeed
    from transformers import LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    model = LlamaForCausalLM.from_pretrained("llama")
    return {"torch": torch, "deepspeed": deepspeed, "model": model, "LlamaDecoderLayer": LlamaDecoderLayer}


def _save_llama_and_texts() -> None:
    import json
    from pathlib import Path

    from safetensors.torch import save_model
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    rows = [{"instruction": f"count from {n}", "output": f"{n} {n + 1} {n + 2} {n + 3}"} for n in range(24)] * 8
    Path("alpaca.json").write_text("\n".join(map(json.dumps, rows)))
    words = ["<unk>", "</s>", "###", "Instruction:", "Response:", "count", "from", *map(str, range(40))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>").save_pretrained("llama")
    shape = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(**shape, num_attention_heads=2, num_key_value_heads=2, eos_token_id=1, bos_token_id=1)
    config.save_pretrained("llama")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        save_model(LlamaForCausalLM(config), "llama/model.safetensors", metadata={"format": "pt"})
