# 1. Overlap communication with computation
zero_config = {
    "overlap_comm": True,
    "contiguous_gradients": True,
}

# 2. Optimize bucket sizes (tune for GPU memory and bandwidth)
zero_config["allgather_bucket_size"] = 5e8  # 500MB
zero_config["reduce_bucket_size"] = 5e8

# 3. ZeRO-3 prefetching
zero_config["stage3_prefetch_bucket_size"] = 5e7
zero_config["stage3_param_persistence_threshold"] = 1e6

# 4. Compile optimization (PyTorch 2.0+)
model = torch.compile(model)
