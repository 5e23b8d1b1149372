"""`init_inference`: a model that only answers. Cut over ranks, streamed from main memory or a disk, its layers run by ztk's kernels."""
