"""`rollout.environment`, and a first step before ranks start."""

from typing import TYPE_CHECKING

from ztk.config.rewards import evaluation_config, first_prompt
from ztk.config.text import encoding_of
from ztk.core.policies.config import Config
from ztk.core.policies.runs import draws

if TYPE_CHECKING:
    from ztk.rl.rollout.environments import Environments

KEY = "rollout.environment"
_ANSWER = "42"  # of the first step


def open_environments(config: Config) -> "Environments | None":
    """The user's environments, or None for a run without them.

    Raises:
        ValueError: the class cannot be imported.
    """
    from ztk.rl.rollout.environments import Environments  # here: torch takes a second
    from ztk.rl.rollout.rewards import load_function

    name = config.rollout.environment
    if name is None:
        return None
    assert config.reward.timeout_seconds is not None, "the configuration is checked"
    make = load_function(name, key=KEY, kind="class")
    return Environments(make, name=f"{KEY}={name}", timeout_seconds=config.reward.timeout_seconds)


def prepare_environment(config: Config) -> None:
    """Imports the environment and plays one step of one sample, with the first prompt of the data and the answer "42".

    Raises:
        ValueError: a class that cannot be imported, a call that raises, is late or returns something else than it should, or an observation
            that the chat template refuses.
    """
    if not draws(config) or config.rollout.environment is None:
        return
    own = evaluation_config(config)
    _play_once(config)
    if own is not None and own.data.path != config.data.path:
        _play_once(own)


def _play_once(config: Config) -> None:
    from ztk.rl.rollout.environments import EnvironmentFault, Episode

    environments = open_environments(config)
    assert environments is not None, "the configuration names one"
    episode = Episode.of(first_prompt(config), number=0)
    try:
        environments.reset([episode])
        [step] = environments.step([episode], answers=[_ANSWER])
    except EnvironmentFault as error:
        raise ValueError(f"called once before the run starts: {error}") from None
    encoding = encoding_of(config)
    encoding.prompt(episode.said, tools=episode.tools)
    if step.observation is not None:
        encoding.between(episode.said, observed=step.observation, tools=episode.tools)
