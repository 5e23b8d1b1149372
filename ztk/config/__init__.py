"""Configuration with Hydra: a typed schema, rules between its groups, and composition. Does not import torch."""

from ztk.config.arguments import (
    CONFIG_DIRS,
    check_doubled,
    conf_dir,
    extra_folders,
    flags_of_hydra,
    folder_of_run,
    folders_of_run,
    join_folders,
    parse_arguments,
    split_flags,
)
from ztk.config.batch import on_fewer_ranks
from ztk.config.compose import SWEEPER, compose, to_config
from ztk.config.ds_config import expand_ds_config
from ztk.config.environments import open_environments, prepare_environment
from ztk.config.errors import ConfigError
from ztk.config.identity import check_resumed, differences, hash_of, job_hash
from ztk.config.keys import named_by
from ztk.config.named_code import check_named_code, code_words, folder_names_code
from ztk.config.other_models import config_with, gives_rewards, is_text_model
from ztk.config.own import call_later, callback_nodes, find, instantiate, takes_share, target_of
from ztk.config.planning import hardware_values
from ztk.config.record import from_yaml, load, refusal, save, to_explained_yaml, to_yaml
from ztk.config.reference import GroupReference, KeyReference, build_reference, find_reference
from ztk.config.resumed import recorded_words, take_run_words
from ztk.config.rewards import evaluation_config, has_rewards, open_rewards, prepare_rewards
from ztk.config.sweep import SweepWords, only_resume, take_sweep_keys
from ztk.config.text import prepare_text, text_policy, tokenizer_of_run
from ztk.core.policies.config import Config
from ztk.core.policies.machine import Machine
from ztk.core.policies.runs import is_own, reads_documents
from ztk.core.policies.sweep import RepeatWith, SweepConfig

__all__ = [
    "CONFIG_DIRS",
    "SWEEPER",
    "Config",
    "ConfigError",
    "GroupReference",
    "KeyReference",
    "Machine",
    "RepeatWith",
    "SweepConfig",
    "SweepWords",
    "build_reference",
    "call_later",
    "callback_nodes",
    "check_doubled",
    "check_named_code",
    "check_resumed",
    "code_words",
    "compose",
    "conf_dir",
    "config_with",
    "differences",
    "evaluation_config",
    "expand_ds_config",
    "extra_folders",
    "find",
    "find_reference",
    "flags_of_hydra",
    "folder_names_code",
    "folder_of_run",
    "folders_of_run",
    "from_yaml",
    "gives_rewards",
    "hardware_values",
    "has_rewards",
    "hash_of",
    "instantiate",
    "is_own",
    "is_text_model",
    "job_hash",
    "join_folders",
    "load",
    "named_by",
    "on_fewer_ranks",
    "only_resume",
    "open_environments",
    "open_rewards",
    "parse_arguments",
    "prepare_environment",
    "prepare_rewards",
    "prepare_text",
    "reads_documents",
    "recorded_words",
    "refusal",
    "save",
    "split_flags",
    "take_run_words",
    "take_sweep_keys",
    "takes_share",
    "target_of",
    "text_policy",
    "to_config",
    "to_explained_yaml",
    "to_yaml",
    "tokenizer_of_run",
]
