"""The models of `task=grpo`, `task=ppo`, `task=reward` and `task=dpo`: separate engines with the run's strategy."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ztk.checkpoint.full import full_state_dict, is_cut
from ztk.config import Config
from ztk.core.policies.rollout import StrategyConfig
from ztk.core.runtime import Process
from ztk.core.runtime.part import InitialValues
from ztk.core.runtime.seed import generator
from ztk.data import ByteTokenizer
from ztk.experiments import policies
from ztk.experiments.pretrain import adapted, build_model
from ztk.experiments.prompts import PAD, STOP
from ztk.experiments.tasks import TASKS, name_of
from ztk.hf.attention_interface import use_attention
from ztk.hf.scoring import open_scoring
from ztk.nn import Decoder, initial_values
from ztk.nn.linear import Linear
from ztk.parallel.apply import parallelize
from ztk.parallel.pipeline import MicroBatch
from ztk.rl.rollout import Samples, can_pack, lay_out
from ztk.train.engine import Engine

Values = dict[str, Tensor]  # name -> full parameter, float32 on the CPU


def build(
    config: Config,
    *,
    process: Process,
    values: Values | None = None,
    lr: float | None = None,
    lr_table: Tensor | None = None,
    is_trained: bool = True,
    is_critic: bool = False,
    has_adapters: bool = True,
    accumulation_steps: int | None = None,
    strategy: StrategyConfig | None = None,
) -> Engine:
    """Builds the run's model under its strategy.

    values: initial values that replace those from `train.seed` or `model.path`.
    lr: defaults to optimizer.lr.
    is_critic: the output layer has one number per token, a value.
    has_adapters: with False, omits the adapters of `lora`.
    strategy: changes to the strategy for a model other than the policy.
    """
    if strategy is not None:
        config = policies.of_model(config, given=strategy)
    model, first_values = open_critic(config) if is_critic else build_model(config, has_adapters=has_adapters)
    if not is_trained:
        model.requires_grad_(False)
    optimizer = policies.optimizer_policy(config)
    lr = 0.0 if not is_trained else optimizer.lr if lr is None else lr
    return parallelize(
        model,
        process=process,
        optimizer=replace(optimizer, lr=lr),
        lr_table=lr_table,
        precision=policies.precision_policy(config),
        zero=policies.zero_policy(config),
        offload=policies.offload_policy(config),
        tensor=policies.tensor_policy(config),
        pipeline=policies.pipeline_policy(config),
        gathers_outputs=True,
        recompute=policies.recompute_policy(config),
        accumulation_steps=accumulation_steps or config.train.accumulation_steps,
        initial_values=first_values if values is None else replaced(first_values, values=values, model=model),
    )


def open_critic(config: Config) -> tuple[nn.Module, InitialValues]:
    """Returns a value model, with parameters on the meta device, and its initial values by name and range."""
    given, lora = config.model, policies.lora_policy(config)
    if given.path is not None and given.init is not None:
        options = {"lora": lora, "kernels": bool(given.kernels)}
        return open_scoring(given.path, init=given.init.value, seed=config.train.seed, **options)
    with torch.device("meta"):
        shape = policies.decoder_config(config)
        model = Decoder(replace(shape, tie_embeddings=False))
        model.head = Linear(shape.dim, 1)
    seed = config.train.seed
    found = adapted(model, lora=lora, values=partial(initial_values, model, seed=seed), seed=seed)
    model.head.requires_grad_(True)  # it trains together with adapters
    return found


def replaced(first_values: InitialValues, *, values: Values, model: nn.Module) -> InitialValues:
    """Returns `values` for the parameters that match `model`. A critic's output layer may have a policy's name, but another shape."""
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}

    def value(*, name: str, start: int, stop: int) -> Tensor:
        if name not in values or values[name].shape != shapes[name]:
            return first_values(name=name, start=start, stop=stop)
        return values[name].flatten()[start:stop].clone()

    return value


def full_values(engine: Engine) -> Values:
    """Returns copies of all parameters on every rank. A collective call; needs 4 bytes of main memory per parameter."""
    if is_cut(engine):
        state = full_state_dict(engine, everywhere=True)
        assert state is not None, "on all ranks"
        return {name: value.float() for name, value in state.items()}
    return {
        name: parameter.detach().to("cpu", torch.float32, copy=True)
        for name, parameter in engine.zero.full_parameters()
    }


def warm_start(config: Config, *, process: Process) -> Values | None:
    """Returns the parameters after `warm_start.steps` supervised steps on answers of which a fraction `warm_start.correct` is right.

    None without steps. Adapters start afterwards. Raises ValueError if the ranks cannot divide `warm_start.batch_size`.
    """
    if not config.warm_start.steps:
        return None
    options = {"lr": config.warm_start.lr, "accumulation_steps": 1, "has_adapters": False}
    engine = build(config, process=process, **options)
    packs = config.model.experts is not None and packs_texts(engine)  # losses of routers would count padding
    for rows, lengths, counted in _examples(config, process=process):
        layout = lay_out(rows, lengths=lengths, packs=packs, device=process.device)
        documents = () if layout.documents is None else (layout.documents,)
        engine.train_batch([(layout.tokens, layout.targets(counted), *documents)])
    values = full_values(engine)
    engine.close()
    return values


def _examples(config: Config, *, process: Process) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yields the texts of every step: tokens [batch, T], their lengths [batch], and which tokens are of an answer, bool [batch, T]."""
    warm, seed, length = config.warm_start, config.train.seed, config.data.seq_len
    assert warm.batch_size is not None, "the configuration is checked"
    replica, replicas = process.mesh.replica, process.mesh.replicas
    share, rest = divmod(warm.batch_size, replicas)
    if rest:
        raise ValueError(
            f"warm_start.batch_size={warm.batch_size} cannot be divided over {replicas} ranks: use "
            f"warm_start.batch_size={share * replicas or replicas}"
        )
    task = TASKS[name_of(config)]
    for step in range(warm.steps):
        rows, lengths = torch.full((share, length), PAD), torch.zeros(share, dtype=torch.int64)
        counted = torch.zeros_like(rows, dtype=torch.bool)
        for index, (row, mask) in enumerate(zip(rows, counted, strict=True)):
            number = -1 - (step * warm.batch_size + replica * share + index)  # differ from the numbers of rollouts
            prompt = task.prompt(seed=seed, number=number)
            right = torch.rand((), generator=generator(seed, "right", number)).item() < warm.correct
            answer = prompt.answer if right else task.wrong(prompt.text, seed=seed, number=number)
            text = ByteTokenizer().encode(f"{prompt.text}{answer}{chr(STOP)}")
            row[: len(text)], lengths[index] = text, len(text)
            mask[len(prompt.text) : len(text)] = True
        yield rows, lengths, counted


def values_of_states(critic: Engine, *, samples: Samples, then: Callable[[Tensor], Tensor] | None = None) -> MicroBatch:
    """Returns a forward to the critic's value before each token of the answers, from the position before it: float32 [N], one answer after
    another. then: computes the loss from the values.
    """
    packs, device = packs_texts(critic), critic.process.device
    layout = lay_out(samples.tokens, lengths=samples.lengths, packs=packs, device=device)

    def values_of(model: Any) -> Tensor:
        values = layout.forward(model).flatten().float().index_select(0, layout.before(samples.answer_mask))
        return values if then is None else then(values)

    return layout.micro_batch(values_of)


def packs_texts(engine: Engine) -> bool:
    """Returns whether an engine's module takes packed texts. A model whose layers are cut needs rows of one length."""
    packs = can_pack(engine.module) and engine.process.mesh.is_alone
    if packs:
        use_attention(engine.module)
    return packs
