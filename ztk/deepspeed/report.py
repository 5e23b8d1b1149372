"""What is printed every `steps_per_print` steps: progress, seconds per phase, bytes per tier."""

from ztk.deepspeed.config import Settings
from ztk.deepspeed.log import logger
from ztk.engine import Engine
from ztk.runtime import Tier

_USUAL = 10  # steps between reports if a breakdown is wanted and `steps_per_print` is not given


class StepReport:
    """Rank 0 reports."""

    def __init__(self, engine: Engine, *, settings: Settings) -> None:
        self._engine, self._settings = engine, settings
        wanted = settings.wall_clock_breakdown or settings.memory_breakdown
        self._every = settings.steps_per_print or (_USUAL if wanted else None)
        self._seconds: dict[str, float] = {}

    def after_step(self, facade) -> None:
        """facade: the DeepSpeedEngine whose step has just ended."""
        step = facade.global_steps
        if not self._every or step % self._every or self._engine.process.rank:
            return
        logger.info("step=%d, skipped=%d, lr=%s, mom=%s", step, facade.skipped_steps, facade.get_lr(), facade.get_mom())
        if self._settings.wall_clock_breakdown:
            now = dict(self._engine.clock.seconds)
            spent = {name: now[name] - self._seconds.get(name, 0.0) for name in now}
            self._seconds = now
            text = ", ".join(f"{name} {1000 * seconds / self._every:.2f}" for name, seconds in spent.items())
            logger.info("milliseconds per step: %s", text)
        if self._settings.memory_breakdown:
            for tier in Tier:
                for category, nbytes in sorted(self._engine.memory.by_category(tier).items()):
                    logger.info("memory: %s, %s: %.1f MiB", tier, category, nbytes / 2**20)
