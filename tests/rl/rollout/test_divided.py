"""`rollout.identity=exact` with `topology=tp2`: the trainer's ranks have the bits of an inference engine that two ranks divide alike."""

import pytest
import torch

from tests.rl.rollout.runs import config_of
from tests.rl.rollout.test_served import NO_SIZES
from ztk.core.runtime import Process
from ztk.experiments import policies
from ztk.experiments.models import full_values
from ztk.experiments.policy_run import open_run
from ztk.experiments.prompts import Prompts
from ztk.experiments.rollouts import logprobs_of, policy_of, requests_of
from ztk.inference import Generator, InferencePolicy
from ztk.nn import Decoder, DecoderConfig
from ztk.rl.rollout import compare
from ztk.rl.rollout.cached import sampling_of, write_answers
from ztk.rl.rollout.clients import Channel, ServerFault, ZtkClient

WORDS = ("topology=tp2", "model.kv_heads=2", "rollout.servers=[http://127.0.0.1:9]", "rollout.servers_transfer=gloo")


def differing(process: Process, *, config, sizes: dict) -> tuple[int, int]:
    """Answers of an engine over the ranks of the trainer: tokens, and those whose log-probabilities the trainer computes with other bits."""
    arranged = process.arrange(policies.topology(config))
    given = {"first_values": None, "lr_table": policies.learning_rates(config)}
    run = open_run(config, process=arranged, prompts=Prompts(config), **given)
    module = Decoder(DecoderConfig(**sizes)).eval()
    module.load_state_dict(full_values(run.actor), strict=False)
    policy, requests = policy_of(run, is_trained=False), requests_of(run, first_prompt=0)
    sampling = sampling_of(policy, keys=requests.keys(seed=0, step=0), as_trainer=True)
    comm = process.connect([tuple(range(process.world_size))])
    options = InferencePolicy(max_sequences=len(sampling), max_model_len=policy.length)
    generator, drawn = Generator(module, policy=options, comm=comm), None
    if generator.follows:
        generator.follow()
    else:
        drawn = [own for (own,) in generator.generate([list(own) for own in requests.prompts], sampling=sampling)]
        generator.close()
    samples = requests.begin(policy)
    write_answers(comm.gather_objects(drawn)[0], samples=samples, rows=range(len(samples)))
    logprobs = logprobs_of(run.actor, run=run, samples=samples)
    assert logprobs is not None and torch.allclose(
        logprobs[samples.answer_mask], samples.logprobs[samples.answer_mask], atol=1e-4
    )
    found = int(samples.answer_mask.sum()), compare(samples, logprobs=logprobs).count
    run.close()
    return found


@pytest.mark.parametrize("identity", ["exact", "corrected"])
def test_a_trainer_of_two_ranks_has_the_bits_of_an_engine_of_two_ranks(ranks, tmp_path, identity):
    config = config_of("grpo", *WORDS, f"rollout.identity={identity}", folder=tmp_path, ranks=2)
    sizes = {name: value for name, value in vars(config.model).items() if name not in NO_SIZES and value is not None}
    for tokens, differ in ranks(2).run(differing, config=config, sizes=sizes):
        assert tokens > 32 and (differ > 0) == (identity == "corrected")


def test_a_server_that_divides_its_model_otherwise_is_named():
    class Divided(Channel):
        """One whose server divides its model over 4 ranks."""

        def request(self, *given, **options):
            return {"version": "v1", "parameters": {"w": [2]}, "ranks": 4}

    client = ZtkClient(Divided("http://a:1", seconds=1.0), parameters={"w": (2,)}, ranks=2)
    with pytest.raises(
        ServerFault, match=r"over 4 ranks and this run over 2.* topology.tensor=2, or use rollout.identity=corrected"
    ):
        client.look()
    assert ZtkClient(Divided("http://a:1", seconds=1.0), parameters={"w": (2,)}).look() == "v1"
