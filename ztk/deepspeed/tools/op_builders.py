"""`deepspeed.ops.op_builder`: reports which of DeepSpeed's compiled extensions ztk replaces.

ztk compiles nothing in advance. `load()` returns immediately, an object without the extension's private functions, and `is_compatible()`
reports whether ztk has an equivalent of the op. Other ops cannot be loaded.
"""

from types import SimpleNamespace

from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

# Op -> ztk's replacement.
_DONE = {
    "async_io": "offload_optimizer and offload_param with device nvme",
    "cpu_adam": "deepspeed.ops.adam.DeepSpeedCPUAdam",
    "cpu_lion": "deepspeed.ops.lion.DeepSpeedCPULion",
    "fused_adam": "deepspeed.ops.adam.FusedAdam",
    "fused_lion": "deepspeed.ops.lion.FusedLion",
    "quantizer": "zero_quantized_weights and zero_quantized_gradients",
    "utils": "flatten(tensors) and unflatten(flat, tensors)",
}
_FUNCTIONS = {"utils": {"flatten": _flatten_dense_tensors, "unflatten": _unflatten_dense_tensors}}


class OpBuilder:
    """One op. NAME: DeepSpeed's name of it."""

    NAME = ""

    def __init__(self, name: str | None = None) -> None:
        self.name = name or self.NAME

    def absolute_name(self) -> str:
        """Returns the location of DeepSpeed's extension."""
        return f"deepspeed.ops.{self.name}_op"

    def is_compatible(self, verbose: bool = False) -> bool:
        """Returns whether ztk replaces this op. The result is the same on every machine."""
        return self.name in _DONE

    def load(self, verbose: bool = False) -> "LoadedOp":
        """Returns the op without building anything. Raises RuntimeError for an op that is not compatible."""
        if not self.is_compatible():
            raise RuntimeError(
                f"{type(self).__name__}().load(): ztk does not have the op {self.name!r}; it has {', '.join(_DONE)}. Ask "
                "is_compatible() before"
            )
        return LoadedOp(self.name)


class LoadedOp(SimpleNamespace):
    """Represents a compiled extension. Only `utils` has functions."""

    def __init__(self, name: str) -> None:
        super().__init__(**_FUNCTIONS.get(name, {}))
        self.__name__ = name

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"{self.__name__}.{name}: a function of DeepSpeed's compiled extension, which ztk does not have; its work is done by "
            f"{_DONE[self.__name__]}"
        )


def _builder(class_name: str, *, op: str) -> type[OpBuilder]:
    return type(class_name, (OpBuilder,), {"NAME": op, "__module__": __name__, "__doc__": f"Of the op {op!r}."})


AsyncIOBuilder = _builder("AsyncIOBuilder", op="async_io")
CPUAdagradBuilder = _builder("CPUAdagradBuilder", op="cpu_adagrad")
CPUAdamBuilder = _builder("CPUAdamBuilder", op="cpu_adam")
CPULionBuilder = _builder("CPULionBuilder", op="cpu_lion")
DeepCompileBuilder = _builder("DeepCompileBuilder", op="dc")
EvoformerAttnBuilder = _builder("EvoformerAttnBuilder", op="evoformer_attn")
FPQuantizerBuilder = _builder("FPQuantizerBuilder", op="fp_quantizer")
FusedAdamBuilder = _builder("FusedAdamBuilder", op="fused_adam")
FusedLambBuilder = _builder("FusedLambBuilder", op="fused_lamb")
FusedLionBuilder = _builder("FusedLionBuilder", op="fused_lion")
GDSBuilder = _builder("GDSBuilder", op="gds")
InferenceBuilder = _builder("InferenceBuilder", op="transformer_inference")
InferenceCoreBuilder = _builder("InferenceCoreBuilder", op="inference_core_ops")
InferenceCutlassBuilder = _builder("InferenceCutlassBuilder", op="cutlass_ops")
QuantizerBuilder = _builder("QuantizerBuilder", op="quantizer")
RaggedOpsBuilder = _builder("RaggedOpsBuilder", op="ragged_device_ops")
RaggedUtilsBuilder = _builder("RaggedUtilsBuilder", op="ragged_ops")
RandomLTDBuilder = _builder("RandomLTDBuilder", op="random_ltd")
SpatialInferenceBuilder = _builder("SpatialInferenceBuilder", op="spatial_inference")
StochasticTransformerBuilder = _builder("StochasticTransformerBuilder", op="stochastic_transformer")
TransformerBuilder = _builder("TransformerBuilder", op="transformer")
UtilsBuilder = _builder("UtilsBuilder", op="utils")

ALL_OPS: dict[str, OpBuilder] = {made.NAME: made() for made in OpBuilder.__subclasses__()}
__compatible_ops__: dict[str, bool] = {name: builder.is_compatible() for name, builder in ALL_OPS.items()}
__all__ = ["ALL_OPS", "OpBuilder", *(type(builder).__name__ for builder in ALL_OPS.values())]
