"""Small Hugging Face models, equal on every rank, and their answers. Functions import the libraries."""

import torch
from torch import Tensor, nn

VOCABULARY = 64


def llama(*, nudged: bool = True, **changes) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes | heads | changes, pad_token_id=0, max_position_embeddings=64)
    return _made(LlamaForCausalLM, config, nudged=nudged)


def unplanned() -> nn.Module:
    """Without the plan that transformers brings: two queries to a key."""
    model = llama()
    model._tp_plan = {}
    return model


def opt() -> nn.Module:
    """Its attention remembers the number of heads; it brings no plan."""
    from transformers import OPTConfig, OPTForCausalLM

    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "word_embed_proj_dim": 32,
    }
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return _made(
        OPTForCausalLM, OPTConfig(**sizes, **tokens, num_attention_heads=4, max_position_embeddings=64, dropout=0.0)
    )


def bert() -> nn.Module:
    """An encoder, whose attention has its projections and its output in two modules."""
    from transformers import BertConfig, BertModel

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    return _made(BertModel, BertConfig(**sizes, num_attention_heads=4, max_position_embeddings=64))


def neox() -> nn.Module:
    """Three heads for two ranks; queries, keys and values of a head lie side by side in one weight."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 2}
    return _made(GPTNeoXForCausalLM, GPTNeoXConfig(**sizes, num_attention_heads=3, max_position_embeddings=64))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    tokens = {"bos_token_id": 1, "eos_token_id": 2}
    return _made(
        GPT2LMHeadModel,
        GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, **tokens),
    )


def gemma() -> nn.Module:
    """Norms that multiply by 1 + weight, gates by the tanh form of gelu."""
    from transformers import GemmaConfig, GemmaForCausalLM

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    return _made(GemmaForCausalLM, GemmaConfig(**sizes, **heads, max_position_embeddings=64))


def _made(kind: type, config: object, *, nudged: bool = True) -> nn.Module:
    """nudged: no parameter has a value that stands for nothing, as ones in norms and zeros in biases."""
    torch.manual_seed(1)
    model = kind(config).eval()
    with torch.no_grad():
        for parameter in model.parameters() if nudged else ():
            parameter.add_(0.02 * torch.randn(parameter.shape))
    return model


def prompts(*, rows: int = 2, length: int = 9, seed: int = 0) -> Tensor:
    """int64 [rows, length], without padding."""
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def answer(model: nn.Module, tokens: Tensor) -> Tensor:
    """Logits, or an encoder's last states: fp32."""
    output = model(input_ids=tokens)
    return (output.logits if hasattr(output, "logits") else output.last_hidden_state).float()


def greedy(model: nn.Module, tokens: Tensor, *, new: int = 12, **more) -> Tensor:
    return model.generate(tokens, max_new_tokens=new, min_new_tokens=new, do_sample=False, **more)
