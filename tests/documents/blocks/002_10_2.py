# Multi-GPU inference (tensor parallelism)
ds_engine = deepspeed.init_inference(
    model=model,
    mp_size=4,  # Distribute across 4 GPUs
    dtype=torch.float16,
    replace_with_kernel_inject=True,
    injection_policy={
        LlamaDecoderLayer: ("self_attn.o_proj", "mlp.down_proj")
    }
)
