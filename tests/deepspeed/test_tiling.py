"""`TiledLinear` and `ds_to_universal`."""

import pytest
import torch
from torch import nn

import ztk.deepspeed as deepspeed
from tests.deepspeed import scripts
from ztk.checkpoint.errors import CheckpointError
from ztk.core.runtime import Process
from ztk.deepspeed.saved import ds_to_universal
from ztk.deepspeed.zero.tiling import TiledLinear, TiledLinearReturnBias


class Returning(nn.Linear):
    """As Megatron's layers."""

    def forward(self, x):
        return nn.functional.linear(x, self.weight), self.bias


@pytest.mark.parametrize(("bias", "rows", "columns"), [(True, 3, 2), (False, 1, 4), (True, 5, 1)])
def test_tiles_equal_one_layer(bias, rows, columns):
    """In fp64, where the order of the sums shows in the 15th digit."""
    layer, x = nn.Linear(7, 5, bias=bias).double(), torch.randn(2, 3, 7, dtype=torch.float64)
    options = {"bias": bias, "in_splits": columns, "out_splits": rows, "init_linear": layer, "dtype": torch.float64}
    tiled = TiledLinear(7, 5, **options)
    torch.testing.assert_close(tiled(x), layer(x), rtol=1e-12, atol=1e-12)
    split = TiledLinear(7, 5, input_is_already_split=True, combine_out_splits=False, **options)
    sizes = [stop - start for start, stop in zip(split.in_parts, split.in_parts[1:], strict=False)]
    torch.testing.assert_close(torch.cat(split(x.split(sizes, dim=-1)), dim=-1), layer(x), rtol=1e-12, atol=1e-12)
    out, own = TiledLinearReturnBias(7, 5, linear_cls=Returning, **options)(x)
    torch.testing.assert_close(out if own is None else out + own, layer(x), rtol=1e-12, atol=1e-12)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"in_splits=8: must be from 1 to the number of features, 7"):
        TiledLinear(7, 5, in_splits=8)
    with pytest.raises(ValueError, match="without bias cannot fill"):
        TiledLinear(7, 5, init_linear=nn.Linear(7, 5, bias=False))


def tiled_training(process: Process, *, stage: int, folder: str) -> tuple[list[float], float]:
    """Weights out of a sharded layer, trained, saved and made universal. Losses, and the largest tile that stage 3 gathers at once."""
    config = scripts.config(stage=stage)
    model = scripts.build()
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=stage == 3):
        model.fc1 = TiledLinear(
            model.fc1.in_features, model.fc1.out_features, in_splits=2, out_splits=2, init_linear=model.fc1
        )
    engine, *_ = deepspeed.initialize(model=model, config=config)
    losses = []
    for step in range(4):
        if step == 2 and folder:
            engine.save_checkpoint(folder, tag="before")
            if process.rank == 0:
                arguments = ["--input_folder", f"{folder}/before", "--output_folder", f"{folder}/universal"]
                ds_to_universal.main(ds_to_universal.parse_arguments(arguments))
            process.comm.barrier()
        x, y = (value.chunk(2)[process.rank] for value in scripts.data(step))
        loss = nn.functional.cross_entropy(engine(x), y)
        engine.backward(loss)
        engine.step()
        losses.append(scripts.mean(process, float(loss.detach())))
    if folder:
        engine.load_checkpoint(folder, tag="universal")
        assert engine.global_steps == 2
    engine.destroy()
    return losses


def test_a_tiled_layer_trains_at_stage_3(ranks, tmp_path):
    first = ranks(2).run(tiled_training, stage=0, folder="")[0]
    assert ranks(2).run(tiled_training, stage=3, folder=str(tmp_path))[0] == first
    assert first == pytest.approx(scripts.plain()[0][:4], abs=1e-5)
    assert (tmp_path / "latest_universal").read_text() == "universal"


def test_another_folder_is_not_made_universal(tmp_path):
    arguments = ["--input_folder", str(tmp_path), "--output_folder", str(tmp_path / "out")]
    with pytest.raises(CheckpointError, match=r"python -m ztk.checkpoint import"):
        ds_to_universal.main(ds_to_universal.parse_arguments(arguments))
