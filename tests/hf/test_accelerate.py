"""`Accelerator(deepspeed_plugin=...)`: a custom loop compared with the same loop in plain PyTorch. Tolerance: see test_trainer."""

import functools

import pytest
import torch

from tests.hf import small

STEPS, MICRO, ACCUMULATION = 6, 2, 2


def batches(size: int) -> torch.utils.data.DataLoader:
    tokens = torch.tensor([row["input_ids"] for row in small.rows(2 * MICRO * ACCUMULATION * STEPS)])
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(tokens), batch_size=size)


def schedule(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))


@functools.cache
def plain(source: str) -> tuple[list[float], list[float]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = schedule(optimizer)
    losses, norms = [], []
    for number, (tokens,) in enumerate(batches(2 * MICRO)):
        loss = model(input_ids=tokens, labels=tokens).loss
        (loss / ACCUMULATION).backward()
        losses.append(loss.item())
        if number % ACCUMULATION:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
            optimizer.step()
            for _ in range(2):  # accelerate moves a schedule once for every process
                scheduler.step()
            optimizer.zero_grad()
    return losses, norms


def loop(*, source, folder, stage, named=False, resume=False) -> dict:
    """The loop of accelerate's documentation: prepare, accumulate, backward, clip, step; state saved half way or loaded.

    named: optimizer and schedule stand in the configuration, and dummies in the script.
    """
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin, DummyOptim, DummyScheduler, set_seed
    from transformers import AutoModelForCausalLM

    if named:
        warmup = dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto")
        params = {"lr": "auto", "weight_decay": "auto"}  # accelerate fills in only these two
        config = small.ds_config(stage, optimizer={"type": "AdamW", "params": params})
        config |= {"gradient_accumulation_steps": ACCUMULATION, "gradient_clipping": 0.5}
        plugin = DeepSpeedPlugin(hf_ds_config=config | {"scheduler": {"type": "WarmupLR", "params": warmup}})
    else:
        plugin = DeepSpeedPlugin(
            zero_stage=stage,
            gradient_accumulation_steps=ACCUMULATION,
            gradient_clipping=0.5,
            zero3_save_16bit_model=True,
        )
    accelerator = Accelerator(deepspeed_plugin=plugin)
    assert accelerator.num_processes == 2
    set_seed(0)
    model = AutoModelForCausalLM.from_pretrained(source).train()
    if named:
        optimizer = DummyOptim(model.parameters(), lr=1e-2, weight_decay=0.01)
        scheduler = DummyScheduler(optimizer, total_num_steps=STEPS, warmup_num_steps=2)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = schedule(optimizer)
    model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, batches(MICRO), scheduler)
    losses, norms, first = [], [], 0
    if resume:
        accelerator.load_state(folder)
        first = ACCUMULATION * STEPS // 2
        data = accelerator.skip_first_batches(data, first)
    for number, (tokens,) in enumerate(data, start=first):
        with accelerator.accumulate(model):
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5) or 0))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
        if not resume and number + 1 == ACCUMULATION * STEPS // 2:
            accelerator.save_state(folder)
    state = accelerator.get_state_dict(model)  # at stage 3 only rank 0 has it
    assert accelerator.unwrap_model(model) is model.module
    full = None if state is None else {name: value.clone() for name, value in state.items()}
    accelerator.free_memory()
    return {"losses": losses, "norms": norms, "state": full}


@pytest.mark.parametrize("stage", [2, 3])
def test_a_loop_is_that_of_plain_pytorch(hf, model_folder, tmp_path, stage):
    losses, norms = plain(model_folder)
    case = {"source": model_folder, "folder": str(tmp_path / "state"), "stage": stage}
    found = hf(loop, **case)[0]
    assert found["losses"] == pytest.approx(losses, rel=1e-5)
    assert found["norms"] == pytest.approx(norms, rel=1e-4) and losses[-1] < losses[0]
    again = hf(loop, **case, resume=True)[0]
    assert again["losses"] == pytest.approx(losses[len(losses) // 2 :], rel=1e-5)
    for name, value in found["state"].items():
        torch.testing.assert_close(again["state"][name], value, rtol=1e-5, atol=1e-6)


def test_optimizer_and_schedule_from_the_configuration(hf, model_folder, tmp_path):
    two, three = (
        hf(loop, source=model_folder, folder=str(tmp_path / str(stage)), stage=stage, named=True)[0] for stage in (2, 3)
    )
    assert two["losses"] == pytest.approx(three["losses"], rel=1e-5) and two["losses"][-1] < two["losses"][0]


def twice(*, source: str, stage: int) -> list[float]:
    """The same model prepared, trained and freed two times, each with a fresh optimizer."""
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin
    from transformers import AutoModelForCausalLM

    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=stage, gradient_clipping=0.5))
    model = AutoModelForCausalLM.from_pretrained(source).train()
    losses = []
    for _ in range(2):
        made, optimizer, data = accelerator.prepare(
            model, torch.optim.AdamW(model.parameters(), lr=1e-2), batches(MICRO)
        )
        for (tokens,), _ in zip(data, range(3), strict=False):
            loss = made(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            losses.append(accelerator.gather(loss.detach()).mean().item())
        del made, optimizer, data
        accelerator.free_memory()
    return losses


def plain_twice(source: str) -> list[float]:
    from transformers import AutoModelForCausalLM

    model, losses = AutoModelForCausalLM.from_pretrained(source).train(), []
    for _ in range(2):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for (tokens,), _ in zip(batches(2 * MICRO), range(3), strict=False):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize("stage", [2, 3])
def test_a_model_may_be_prepared_again(hf, model_folder, stage):
    assert hf(twice, source=model_folder, stage=stage)[0] == pytest.approx(plain_twice(model_folder), rel=1e-5)
