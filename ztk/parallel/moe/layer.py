"""A mixture of experts around any expert module, with DeepSpeed's arguments and meaning."""

import copy
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from ztk.core.runtime import Comm
from ztk.core.runtime.planned import without_autocast
from ztk.nn.balance import ExpertLoad
from ztk.parallel.moe.all_to_all import AsyncAllToAll
from ztk.parallel.moe.gate import Assignment, GatePolicy, Gating, assign, jitter, uniform

_NOISE = (None, "None", "Jitter", "RSample")


class MoE(nn.Module):
    """hidden [..., C] -> (output [..., C], l_aux, exp_counts [E]), as `deepspeed.moe.layer.MoE`.

    hidden_size: C, features of a token. expert: a module [..., C] -> [..., C] (the first element of a tuple is used); the layer
    makes `num_experts` copies of it.
    ep_size: number of ranks over which `ztk.parallel.moe.shard_experts` distributes the experts; 1 keeps all experts on every rank.
    k: experts per token. capacity_factor, eval_capacity_factor, min_capacity: each expert takes at most
        max(ceil(tokens / num_experts * k * factor), min_capacity) of a rank's tokens.
    use_residual: applies `expert` itself to every token, too, and returns a learned mix of both (Rajbhandari et al. 2022,
        https://arxiv.org/abs/2201.05596).
    noisy_gate_policy: "Jitter" multiplies the gate's input by 1 +- 0.01, "RSample" samples top-1 choices; in training.
    drop_tokens: if False, every expert gets the capacity that it needs; the host waits for that number.
    use_rts: with k=1 random tokens are dropped instead of the last ones.
    top2_2nd_expert_sampling: with k=2 the second expert is sampled.

    l_aux is the load balancing loss, a float32 scalar: add it, times a small number, to the model's loss. exp_counts is int64 [E] on the
    device: choices before any was dropped. Expert parameters have DeepSpeed's attributes `allreduce=False` and `group_name`. Empty places
    of an expert are rows of zeros.

    Raises ValueError for arguments that do not fit together.
    """

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module,
        num_experts: int = 1,
        ep_size: int = 1,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        use_residual: bool = False,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        use_tutel: bool = False,
        enable_expert_tensor_parallelism: bool = False,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        super().__init__()
        _check(num_experts=num_experts, ep_size=ep_size, k=k, noise=noisy_gate_policy)
        if use_tutel:
            raise ValueError("use_tutel=True: ztk routes by its own kernels; leave it out")
        if enable_expert_tensor_parallelism:
            raise ValueError(
                "enable_expert_tensor_parallelism=True: a rank keeps full experts; leave it out and raise ep_size"
            )
        self.num_experts, self.ep_size = num_experts, ep_size
        self.gate = nn.Linear(hidden_size, num_experts, bias=False)
        self.experts = nn.ModuleDict({str(number): copy.deepcopy(expert) for number in range(num_experts)})
        for parameter in self.experts.parameters():
            # pyrefly: ignore[missing-attribute]  # the mark of DeepSpeed's expert parameters
            parameter.allreduce, parameter.group_name = False, f"ep_size_{ep_size}"
        self.mlp = expert if use_residual else None
        self.coefficient = nn.Linear(hidden_size, 2) if use_residual else None
        self.policy = GatePolicy(
            k=k,
            capacity_factor=capacity_factor,
            eval_capacity_factor=eval_capacity_factor,
            min_capacity=min_capacity,
            noise=None if noisy_gate_policy == "None" else noisy_gate_policy,
            drop_tokens=drop_tokens,
            random_selection=use_rts,
            sample_second=top2_2nd_expert_sampling,
        )
        self.load = ExpertLoad()
        self.comm: Comm | None = None  # ranks that share the experts; None if all are on this rank
        self.same_tokens: Comm | None = (
            None  # ranks with the same tokens, which must draw the same numbers; None if there is one
        )
        self.register_load_state_dict_pre_hook(_rename_deepspeeds)

    @property
    def num_local_experts(self) -> int:
        """Experts on this rank."""
        return len(self.experts)

    @property
    def deepspeed_moe(self) -> SimpleNamespace:
        """The gate and the experts under the names of DeepSpeed's layer: `moe.deepspeed_moe.experts.deepspeed_experts[0]`."""
        own = list(self.experts.values())
        return SimpleNamespace(
            gate=SimpleNamespace(wg=self.gate, k=self.policy.k),
            experts=SimpleNamespace(deepspeed_experts=own, num_local_experts=len(own)),
            num_local_experts=len(own),
            ep_size=self.ep_size,
        )

    def forward(self, hidden_states: Tensor, used_token: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """hidden_states [.., C] -> (output [.., C], l_aux, exp_counts). used_token: [T], 0 for tokens that go to no expert; for k=1."""
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        chosen = self._choose(tokens, used_token=used_token)
        if self.training:
            dropped = chosen.exp_counts.sum() - chosen.kept.sum()
            self.load.add(counts=chosen.exp_counts, dropped=dropped, balance=chosen.l_aux)
        slots = torch.where(
            chosen.kept, chosen.experts * chosen.capacity + chosen.places, self.num_experts * chosen.capacity
        )
        places = _fill_places(tokens, slots=slots, num_places=self.num_experts * chosen.capacity)
        results, mlp = self._through_experts(places, capacity=chosen.capacity, hidden=hidden_states)
        output = _combine(results, slots=slots, weights=chosen.weights).view_as(hidden_states)
        if mlp is not None:
            assert self.coefficient is not None, "it weighs the residual MLP"
            mix = self.coefficient(hidden_states).softmax(dim=-1)
            output = output * mix[..., :1] + mlp * mix[..., 1:]
        return output, chosen.l_aux, chosen.exp_counts

    def _choose(self, tokens: Tensor, *, used_token: Tensor | None) -> Assignment:
        x = tokens.float()
        if self.policy.noise == "Jitter" and self.training:
            x = jitter(x, uniform=self._uniform)
        with without_autocast(tokens.device):
            logits = x @ self.gate.weight.float().t()
        gating = Gating(
            policy=self.policy,
            training=self.training,
            largest_load=self._largest_load,
            uniform=self._uniform,
            used_token=used_token,
        )
        return assign(logits, gating=gating)

    def _uniform(self, like: Tensor) -> Tensor:
        numbers = uniform(like)  # drawn on every rank, so that all generators advance alike
        if self.same_tokens is not None:
            self.same_tokens.broadcast(numbers, source=0, label="random numbers of a gate").wait()
        return numbers

    def _largest_load(self, counts: Tensor) -> int:
        largest = counts.max().view(1)
        if self.comm is not None:
            largest = self.comm.gather_scalars(largest, label="largest load of an expert")
        return max(1, int(largest.max()))

    def _through_experts(self, places: Tensor, *, capacity: int, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """places [E * capacity, C] -> their results, and the residual expert's result for `hidden`, computed during the all-to-all."""
        if self.comm is None:
            return self._run_experts(places, capacity=capacity), self._residual(hidden)
        ranks = self.comm.size
        equal = [self.num_local_experts * capacity] * ranks
        to_experts = AsyncAllToAll(self.comm, send=equal, receive=equal, label="to experts")
        buffer = to_experts.start(places)
        mlp = self._residual(hidden)
        arrived = to_experts.wait(buffer)
        results = self._run_experts(arrived, capacity=capacity)
        from_experts = AsyncAllToAll(self.comm, send=equal, receive=equal, label="from experts")
        return from_experts.wait(from_experts.start(results, anchor=arrived)), mlp

    def _run_experts(self, places: Tensor, *, capacity: int) -> Tensor:
        """places [ranks * own experts * capacity, C], grouped by rank; experts get [ranks, 1, capacity, C] as in DeepSpeed."""
        by_expert = places.view(-1, self.num_local_experts, capacity, places.shape[1]).split(1, dim=1)
        results = [_first(expert(part)) for expert, part in zip(self.experts.values(), by_expert, strict=True)]
        return torch.cat(results, dim=1).view(places.shape)

    def _residual(self, hidden: Tensor) -> Tensor | None:
        return None if self.mlp is None else _first(self.mlp(hidden))


def _check(*, num_experts: int, ep_size: int, k: int, noise: str | None) -> None:
    if num_experts < 1 or ep_size < 1 or num_experts % ep_size:
        raise ValueError(f"num_experts={num_experts} must be a multiple of ep_size={ep_size}")
    if not 1 <= k <= num_experts:
        raise ValueError(f"k={k}: must be from 1 to num_experts={num_experts}")
    if noise not in _NOISE:
        raise ValueError(f"noisy_gate_policy={noise!r}: must be 'Jitter', 'RSample' or None")


def _fill_places(tokens: Tensor, *, slots: Tensor, num_places: int) -> Tensor:
    """[num_places, C]: the token of each place, zeros where there is none. slots: int64 [T, k], `num_places` for dropped choices."""
    T = tokens.shape[0]
    source = slots.new_full((num_places + 1,), T)  # one extra place for dropped choices
    numbers = torch.arange(T, device=slots.device)[:, None].expand_as(slots)
    source.scatter_(0, slots.flatten(), numbers.flatten())
    padded = torch.cat([tokens, tokens.new_zeros(1, tokens.shape[1])])
    return padded.index_select(0, source[:-1])


def _combine(results: Tensor, *, slots: Tensor, weights: Tensor) -> Tensor:
    """[T, C]: each token's weighted sum, in float32 and rounded once."""
    padded = torch.cat([results, results.new_zeros(1, results.shape[1])])
    rows = padded.index_select(0, slots.flatten()).view(*slots.shape, -1)
    return (rows * weights[:, :, None]).sum(dim=1).to(results.dtype)


def _first(out: Tensor | tuple) -> Tensor:
    return out[0] if isinstance(out, tuple) else out


def _rename_deepspeeds(module: MoE, state_dict: dict, prefix: str, *rest: object) -> None:
    """Renames the entries of a state_dict from DeepSpeed's layer."""
    renames = {"deepspeed_moe.gate.wg.": "gate.", "deepspeed_moe.experts.deepspeed_experts.": "experts."}
    for old, new in renames.items():
        for name in [name for name in state_dict if name.startswith(prefix + old)]:
            state_dict[prefix + new + name[len(prefix + old) :]] = state_dict.pop(name)
