#!/bin/sh
# TorchX: two replicas with eight GPUs each, on Kubernetes (Volcano). `--dryrun` after `run` prints the job; `--scheduler slurm` makes one of Slurm.
# The image has ztk installed and run.py in its working directory, and the volume ztk-runs is shared.
torchx run --workspace "" --scheduler kubernetes --scheduler_args queue=default,namespace=default \
    dist.ddp -j 2x8 --gpu 8 --cpu 64 --memMB 1000000 --max_retries 3 \
    --image registry.example/ztk:latest --mounts type=volume,src=ztk-runs,dst=/shared \
    --script run.py -- \
    zero=stage3 model=7b checkpoint.every=200 hydra.run.dir=/shared/run
