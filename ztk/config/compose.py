"""Composes groups into one checked, settled `Config`."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from ztk.config.arguments import OVERLAYS, conf_dir, declare_groups, parse_arguments, read_option, search_path
from ztk.config.batch import round_faults
from ztk.config.derived import derive_choices, settle
from ztk.config.ds_config import expand_ds_config
from ztk.config.effects import null_unused_defaults
from ztk.config.errors import ConfigError
from ztk.config.evaluating import choose_engine, take_evaluated
from ztk.config.generation import take_generation
from ztk.config.hugging_face import take_files, take_sizes
from ztk.config.keys import SWEEP, flatten, named_by, run_keys, section_of
from ztk.config.lengths import take_lengths
from ztk.config.own import OBJECTS, USER, empty_free, keyless, take_user
from ztk.config.planning import PLAN, take_measured
from ztk.config.record import key_types, refusal, without_objects
from ztk.config.resumed import take_run_words
from ztk.config.rollout import choose_rollouts
from ztk.config.rules import check
from ztk.config.suggest import near_keys
from ztk.config.text_rules import follow_tokenizer
from ztk.core.launch import quoted
from ztk.core.policies.config import Config
from ztk.core.policies.data import DataName
from ztk.core.policies.launch import computing_machine
from ztk.core.policies.machine import Machine
from ztk.core.policies.runs import ANSWERING, OVERWRITE, draws, is_own, reports_mfu, times_kernels
from ztk.core.policies.suggest import did_you_mean


def _composed_schema() -> DictConfig:
    """Returns the types that Hydra checks. Groups whose object may be the user's take any key here; `_typed` checks ztk's own objects."""
    nodes = {
        field.name: OmegaConf.structured(section_of(f"{field.name}."))
        for field in fields(Config)
        if field.name not in (*OBJECTS, "output_dir", "own", USER)
    }
    free = {name: OmegaConf.create({}, flags={"struct": False}) for name in (*OBJECTS, USER)}
    return OmegaConf.create({**nodes, **free, "output_dir": "???"})


ConfigStore.instance().store(name="ztk_schema", node=_composed_schema())
declare_groups()
# Hydra's own sweeper with the class that `ztk.cli` registers.
SWEEPER = "hydra_plugins.ztk.JobSweeper"
ConfigStore.instance().store(
    group="hydra/sweeper", name="ztk", node={"_target_": SWEEPER, "max_batch_size": None, "params": None}
)


def compose(
    *overrides: str,
    output_dir: str | os.PathLike,
    machine: Machine | None = None,
    folders: Sequence[str | os.PathLike] = (),
) -> Config:
    """Returns the configuration that `python run.py OVERRIDES...` would run, without starting it. Raises ConfigError.

    folders: additional folders, as of `--config-dir`.
    """
    machine = machine or Machine.here()
    words = expand_ds_config(overrides, machine=machine).words
    words = take_run_words(
        words, has_ranks=bool(machine.started_ranks), folders=[os.fspath(folder) for folder in folders]
    ).words
    arguments = parse_arguments(words, folders=[conf_dir(), *(os.fspath(folder) for folder in folders)])
    if several := [word for word in arguments if word.startswith(f"{SWEEP}.")]:
        raise ConfigError([f"{word}: is for a sweep, and this is one run; leave it out" for word in several])
    folder = str(Path(output_dir).absolute())
    try:
        with initialize_config_dir(conf_dir(), version_base="1.3"):
            choices = hydra_compose(
                "config",
                overrides=[*arguments, f"output_dir={quoted(folder)}", *([search_path(folders)] if folders else [])],
                return_hydra_config=True,
            )
    except (HydraException, yaml.YAMLError) as error:
        raise refusal(error) from None
    with open_dict(choices):
        options = choices.pop("hydra").runtime.choices
    return to_config(choices, overrides=arguments, options=options, machine=machine)


def to_config(
    choices: DictConfig, *, overrides: Sequence[str], options: Mapping[str, str | None], machine: Machine
) -> Config:
    """Checks types and rules, and then settles the values that depend on the machine. Raises ConfigError with all faults.

    choices: the composed configuration. overrides: `key=value` words of the command line. options: the chosen option of every group.
    """
    try:
        empty_free(choices, overrides=overrides)
        if faults := [*keyless(choices), *take_user(choices)]:
            raise ConfigError(faults)
        choices, own, user = without_objects(choices, overrides=overrides)
        if overwrites := choices.checkpoint.resume == OVERWRITE:
            choices.checkpoint.resume = None
        if faults := [*take_files(choices), *take_sizes(choices), *take_measured(choices)]:
            raise ConfigError(faults)
        config = _typed(choices)
    except OmegaConfBaseException as error:
        raise refusal(error, overrides=overrides) from None
    config.own, config.user, config.overwrites = own, user, overwrites
    machine = computing_machine(config.launch, machine=machine)
    config.given = _given(config, overrides=overrides, options=options)
    chooses_data = "data" in map(named_by, overrides)
    if config.data.path is not None and config.data.name is DataName.stdlib and not chooses_data:
        config.data.name = DataName.files  # a path is enough to choose files
    choose_rollouts(config, machine=machine)
    choose_engine(config, machine=machine)
    null_unused_defaults(config, machine=machine)
    if (
        not is_own(config, section="model")
        and config.task.name not in ANSWERING
        and (faults := follow_tokenizer(config))
    ):
        raise ConfigError(faults)
    if faults := [*_option_faults(config, options=options, machine=machine)]:
        raise ConfigError(faults)
    derive_choices(config)
    if faults := [*take_evaluated(config), *take_generation(config), *take_lengths(config)]:
        raise ConfigError(faults)
    check(config, machine=machine)
    settle(config, machine=machine)
    if faults := [*round_faults(config)]:
        raise ConfigError(faults)
    return config


def _option_faults(config: Config, *, options: Mapping[str, str | None], machine: Machine) -> Iterator[str]:
    """Yields one line per chosen option that the task does not read."""
    task = config.task.name
    if (algorithm := options.get("algorithm")) and not draws(config):
        yield f"algorithm={algorithm} has no effect with task={task}: use task=grpo or task=ppo"
    has_rates = task == PLAN or times_kernels(config) or reports_mfu(config, machine=machine)
    if (hardware := options.get("hardware")) and not has_rates:
        fix = "use task=plan" if task in ANSWERING else "use task=plan, or kernels.log_every=N"
        yield f"hardware={hardware} has no effect with task={task}: {fix}"
    if (weights := options.get("weights")) and task not in ANSWERING:
        yield f"weights={weights} has no effect with task={task}: use task=generate, task=serve or task=eval"


def _typed(choices: DictConfig) -> Config:
    known = [*run_keys(), "output_dir"]
    try:
        values = OmegaConf.to_container(choices, resolve=True)
        unknown = [
            key for key, _ in flatten(values) if key not in known and not any(key.startswith(f"{k}.") for k in known)
        ]
        if unknown:
            raise ConfigError(
                [f"{key}: there is no such key{did_you_mean(near_keys(key, keys=known))}" for key in unknown]
            )
        return OmegaConf.to_object(OmegaConf.merge(key_types(), choices))
    except MissingMandatoryValue as error:
        raise ConfigError([f"{error.full_key}: has no value; choose an option of its group or set it"]) from None


def _given(config: Config, *, overrides: Sequence[str], options: Mapping[str, str | None]) -> frozenset[str]:
    """Returns the keys that the user set, and the groups whose option the command line chooses.

    A key counts if it is on the command line, or if an experiment sets it to another value than the defaults and options.
    """
    known = run_keys()
    named = {key for key in map(named_by, overrides) if key in known or key in options}
    sources = [("", Path(conf_dir(), "config.yaml"))]
    sources += [(group, Path(conf_dir(), group, f"{option}.yaml")) for group, option in options.items() if option]
    sources.sort(key=lambda source: OVERLAYS.index(source[0]) if source[0] in OVERLAYS else -1)
    usual = {name: key.default for name, key in run_keys().items()}
    for group, path in sources:
        if path.is_file() and not group.startswith(("hydra/", "experiment", "sweep")):
            is_overlay, values = read_option(path)
            usual |= dict(flatten(values, prefix="" if is_overlay or not group else f"{group}."))
    interpolated = {key for key, value in usual.items() if isinstance(value, str) and "${" in value}
    changed = {
        key
        for key, value in flatten(config)
        if value is not None and key not in interpolated and value != usual.get(key)
    }
    return frozenset(named | changed) - {"output_dir"}
