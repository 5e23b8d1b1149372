"""Lists the functions of ztk that call each op of `ztk.kernels`, from the source: `python scripts/kernel_callers.py`."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "ztk"

# Where each op is used, for every op of `ztk.kernels.ALL_OPS`.
HOT_PATHS = {
    "step_control": "step: loss scale, clipping, learning rate, decision to skip",
    "sum_of_squares": "step: norm of the gradients",
    "adamw": "step: AdamW, Adam and Muon's other parameters, fp32 states",
    "adamw_bf16": "step: AdamW, bf16 states, fp32 master weights",
    "adamw_stochastic": "step: AdamW, bf16 states, bf16 parameters rounded stochastically",
    "adamw_8bit": "step: AdamW, 8-bit states, master weights of 24 bits",
    "sgd": "step: SGD, and Muon's step along a direction",
    "lion": "step: Lion",
    "cast_copy": "backward of the loss over the head's weight: scaling and rounding of its gradients",
    "swiglu": "MLP: gated activation",
    "geglu": "MLP of models of transformers: gated activation with GELU",
    "rms_norm": "norm",
    "layer_norm": "norm of models of transformers, and of inference",
    "rope": "attention: rotary embedding of queries and keys",
    "attention": "attention: of the decoder on a GPU, and of models of transformers with ztk's kernels",
    "attention_varlen": "attention over documents of different lengths in one row",
    "cross_entropy": "loss over logits",
    "sharded_cross_entropy": "loss over logits whose columns are divided over tensor-parallel ranks",
    "linear_cross_entropy": "loss over the head's weight, where the logits would be larger than its saved values",
    "linear_logprob": "log-probabilities of answers over the head's weight, where the logits would be large",
    "segment_scan": "advantages of answers, from rewards and a critic's values",
    "moe_route": "experts: choice and order of tokens",
    "moe_combine": "experts: weighted sum of their results",
    "router_losses": "experts: balance loss and z-loss of the router",
    "grouped_matmul": "experts: products",
    "grouped_matmul_pair": "experts: gate and up products with the activation between",
    "linear_rows": "inference over blocks: linear layers of few rows, weights as stored",
    "gated_rows": "inference over blocks: gate and up with the activation between",
    "cache_rows": "inference over blocks: norm of heads, rotary embedding, keys and values into their blocks",
    "paged_attention": "inference over blocks: attention of single rows and of prompts",
    "copy_blocks": "inference over blocks: copies on write",
    "draw_rows": "inference over blocks: head, temperature and draw, without logits in memory",
    "select_rows": "inference over blocks: top-k, top-p, min-p and draw over logits",
    "quantize": "quantised exchange: before it is sent",
    "dequantize": "quantised gather of parameters: after it has come",
    "dequantize_reduce": "quantised reduction of gradients: sum of the received parts",
    "symmetric_product": "step: Muon's products of a matrix with its transpose, and of a symmetric one with itself",
    "float8_largest": "float8 products: largest magnitudes of rows and columns",
    "float8_codes": "float8 products: codes and scales by rows and columns",
}


def callers() -> dict[str, list[str]]:
    """Op -> "module.function" of each function that names the op, in order of files. Ops may call other ops."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name == "__init__.py" and path.parent.name == "kernels":
            continue  # it exports all ops
        text = path.read_text()
        if "kernels" not in text:
            continue  # parsing everything would take seconds
        tree = ast.parse(text)
        local = dict(_imported(tree))
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for place, name in _uses(tree, local=local):
            caller = f"{module}.{place}" if place else module
            if caller not in found[name]:
                found[name].append(caller)
    return dict(found)


def _imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(name in the file, op), and (name in the file, "") for the package itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("ztk.kernels"):
            yield from ((alias.asname or alias.name, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "ztk":
            yield from ((alias.asname or alias.name, "") for alias in node.names if alias.name == "kernels")


def _uses(tree: ast.AST, *, local: dict[str, str]) -> Iterator[tuple[str, str]]:
    """(function that contains it, op) of every use of an op, outside of imports."""

    def walk(node: ast.AST, place: str) -> Iterator[tuple[str, str]]:
        for child in ast.iter_child_nodes(node):
            inner = place
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                inner = f"{place}.{child.name}" if place else child.name
            if isinstance(child, ast.Name) and local.get(child.id):
                yield place, local[child.id]
            elif (
                isinstance(child, ast.Attribute)
                and isinstance(child.value, ast.Name)
                and local.get(child.value.id) == ""
            ):
                yield place, child.attr
            yield from walk(child, inner)

    yield from walk(tree, "")


def main() -> None:
    for op, names in sorted(callers().items()):
        if op in HOT_PATHS:
            print(f"{op:22} {', '.join(names)}")


if __name__ == "__main__":
    main()
