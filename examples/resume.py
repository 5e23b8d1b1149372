"""Save under one layout, resume under another: a checkpoint belongs to the model.

    torchrun --standalone --nproc-per-node=2 examples/resume.py --checkpoints run --steps 10 --stage 3 --tensor 2
    python examples/resume.py --checkpoints run --steps 20 --stage 1

The second command goes on after step 10, on one rank instead of two, at stage 1 instead of 3, without tensor parallelism. The loss
goes on where it was.
"""

import argparse

import torch

import ztk
from ztk.checkpoint import Retention, Saver, load_newest
from ztk.nn import Decoder, DecoderConfig

CONFIG = DecoderConfig(vocab_size=64, dim=32, layers=2, heads=4, kv_heads=2, hidden_dim=64, max_seq_len=32)
BATCH, LENGTH = 8, 24


def batch(step: int) -> torch.Tensor:
    """Int64 [BATCH, LENGTH + 1], a function of the step: resuming needs no state of the data."""
    start = torch.randint(CONFIG.vocab_size, (BATCH, 1), generator=torch.Generator().manual_seed(step))
    return (start + 5 * torch.arange(LENGTH + 1)) % CONFIG.vocab_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoints", required=True, help="folder of the checkpoints")
    parser.add_argument("--steps", type=int, default=20, help="train up to this step, counted over all runs")
    parser.add_argument("--stage", type=int, default=1, help="ZeRO stage")
    parser.add_argument("--tensor", type=int, default=1, help="ranks that share each layer")
    options = parser.parse_args()
    process = ztk.Process.start().arrange(ztk.Topology(tensor=options.tensor))
    torch.manual_seed(0)
    engine = ztk.parallelize(
        Decoder(CONFIG),
        process=process,
        optimizer=ztk.OptimizerPolicy(name="adamw", lr=1e-2),
        precision=ztk.PrecisionPolicy(dtype=torch.float32),
        zero=ztk.ZeroPolicy(stage=options.stage),
    )
    past = load_newest(engine, folder=options.checkpoints)
    if process.rank == 0 and past is not None:
        print(f"continues after step {past.step}, saved by {past.saved_world_size} ranks")
    with Saver(engine, folder=options.checkpoints, retention=Retention(keep=1)) as saver:
        while engine.global_steps < options.steps:
            tokens = batch(engine.global_steps).to(process.device)  # data-parallel ranks would each take a part
            loss = engine(tokens[:, :-1], tokens[:, 1:])
            engine.backward(loss)
            engine.step()
            if process.rank == 0:
                print(f"step {engine.global_steps}: loss {loss.item():.4f}")
        saver.save()
    engine.close()
    process.stop()


if __name__ == "__main__":
    main()
