"""`init_inference`: inference with a model that is cut over ranks, streamed from main memory or a disk, or run by ztk's kernels."""
