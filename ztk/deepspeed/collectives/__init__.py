"""torch.distributed's collectives under DeepSpeed's names, their log, and the groups of ranks."""
