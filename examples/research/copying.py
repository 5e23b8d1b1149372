"""An own task that uses ztk's loop as a library: `task._target_=copying.main`, texts to repeat that grow while it trains."""

import torch

from ztk.experiments.pretrain import build_engine, build_reporter
from ztk.experiments.ranks import started
from ztk.train.loop import Loop


def main(config, *, longest: int = 8) -> None:
    """Trains one rank. The model, the optimizer and the memory strategy come from the command line; the data are generated here."""
    with started(config) as process:
        engine, batch = build_engine(config, process=process), config.train.micro_batch_size

        def texts(seed: int, *, length: int):
            """Random letters and the same letters again; the first half does not count in the loss."""
            generator = torch.Generator().manual_seed(seed * process.mesh.replicas + process.mesh.replica)
            letters = torch.randint(97, 123, (batch, length), generator=generator)
            tokens = torch.cat([letters, letters], dim=1)
            targets = tokens[:, 1:].clone()
            targets[:, : length - 1] = -100
            return tokens[:, :-1].to(process.device), targets.to(process.device)

        def train_step(step: int):
            length = 2 + (longest - 2) * step // config.train.steps
            return engine.train_batch(texts(step, length=length) for _ in range(engine.accumulation_steps))

        def evaluate() -> float:
            loss = engine.eval_batch([texts(-1, length=longest)])
            return engine.comm.gather_scalars(loss.double().view(1), label="validation").mean().item()

        with build_reporter(config, engine=engine, past={}) as reporter:
            loop = Loop(
                engine,
                train_step=train_step,
                steps=config.train.steps,
                tokens=config.train.global_batch_size * 2 * longest,
                evaluate=evaluate,
                eval_every=config.train.eval_every or 0,
                reporter=reporter,
            )
            ended_by = loop.run()
            reporter.finish(validation_loss=loop.evaluate(), ended_by=ended_by)
        engine.close()
