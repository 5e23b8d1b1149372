"""python -m ztk.deepspeed [--num_gpus N --num_nodes M --hostfile F ...] script.py args: DeepSpeed's launcher, with ztk as `deepspeed`."""

from ztk.deepspeed.runner.main import main

if __name__ == "__main__":
    main()
