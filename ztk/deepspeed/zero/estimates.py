"""DeepSpeed's estimates of memory for parameters, gradients and Adam's states, printed as a table.

They are DeepSpeed's rules of thumb for 16-bit training (18 bytes per parameter). The memory report of a run has ztk's actual values.
"""

from dataclasses import dataclass

from torch import nn

GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryNeeds:
    """Bytes of main memory per node and of memory per GPU, and the corresponding options."""

    cpu_bytes: int
    gpu_bytes: int
    options: str


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> list[MemoryNeeds]:
    """Prints and returns the needs of `model` at stage 2, with and without an offloaded optimizer."""
    return estimate_zero2_model_states_mem_needs_all_cold(
        _total(model), num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> list[MemoryNeeds]:
    """Prints the table of `..._all_live` for a number of parameters."""
    gpus = num_gpus_per_node * num_nodes
    needs = [
        MemoryNeeds(
            cpu_bytes=int(total_params * max(4 * gpus, 16) * additional_buffer_factor),
            gpu_bytes=2 * total_params,
            options="offload_optimizer=cpu ",
        ),
        MemoryNeeds(
            cpu_bytes=int(total_params * 4 * num_gpus_per_node * additional_buffer_factor),
            gpu_bytes=2 * total_params + int(18 * total_params / gpus),
            options="offload_optimizer=none",
        ),
    ]
    return _print(needs, model=_model(total_params), gpus=num_gpus_per_node, nodes=num_nodes)


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> list[MemoryNeeds]:
    """Prints and returns the needs of `model` at stage 3 for every way of offloading."""
    largest = max(sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules())
    return estimate_zero3_model_states_mem_needs_all_cold(
        _total(model), largest, num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> list[MemoryNeeds]:
    """Prints the table of `..._all_live` for a number of parameters and the size of the largest layer."""
    gpus, largest = num_gpus_per_node * num_nodes, 4 * largest_layer_params
    needs = []
    for optimizer, params in ((True, True), (True, False), (False, False)):
        for zero_init in (True, False):
            if optimizer:
                per_node = (18 if params else 16) / num_nodes
                host = total_params * (per_node if zero_init else max(4 * num_gpus_per_node, per_node))
                device = largest + (0 if params else int(2 * total_params / gpus))
            else:
                host = (largest_layer_params if zero_init else total_params) * 4 * num_gpus_per_node
                device = largest + int(18 * total_params / gpus)
            needs.append(
                MemoryNeeds(
                    cpu_bytes=int(host * additional_buffer_factor),
                    gpu_bytes=device,
                    options=f"offload_param={'cpu ' if params else 'none'}, "
                    f"offload_optimizer={'cpu ' if optimizer else 'none'}, zero_init={int(zero_init)}",
                )
            )
    model = f"{_model(total_params)}, {largest_layer_params // 10**6}M largest layer params"
    return _print(needs, model=model, gpus=num_gpus_per_node, nodes=num_nodes)


def _total(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _model(total_params: int) -> str:
    return f"{total_params // 10**6}M total params"


def _print(needs: list[MemoryNeeds], *, model: str, gpus: int, nodes: int) -> list[MemoryNeeds]:
    print("Estimated memory needed for params, optim states and gradients for a:")
    print(f"HW: Setup with {nodes} node{'s' * (nodes > 1)}, {gpus} GPU{'s' * (gpus > 1)} per node.")
    print(f"SW: Model with {model}.")
    print("  per CPU  |  per GPU |   Options")
    for need in needs:
        print(f" {need.cpu_bytes / GIB:7.2f}GB | {need.gpu_bytes / GIB:6.2f}GB | {need.options}")
    return needs
