"""`train.quick=true`: the steps of a run and nothing after them."""

import json

from ztk.config import Machine, compose
from ztk.core.runtime import Process
from ztk.experiments import pretrain

WORDS = (
    "model=nano",
    "data=files",
    "data.seq_len=32",
    "train.steps=2",
    "train.micro_batch_size=1",
    "logger=disabled",
    "train.quick=true",
    "kernels.log_every=2",
    "zero=stage3",
    "offload=cpu",
)


def trained(process: Process, *, folder: str, text: str) -> None:
    machine = Machine(gpus=0, cores=2)
    config = compose(*WORDS, f"data.path={text}", "launch.ranks=2", output_dir=folder, machine=machine)
    pretrain.run(config, process=process)


def test_a_quick_run_has_rows_and_a_summary_and_no_more(ranks, tmp_path):
    text = tmp_path / "text"
    text.write_text("".join(f"line {number} of a text\n" for number in range(2000)))
    ranks(2).run(trained, folder=str(tmp_path), text=str(text))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["status"] == "done" and summary["steps"] == 2 and summary["loss_digest"]
    assert not {"validation_loss", "sample", "bigram_entropy"} & summary.keys()
    first, second = (json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert not [key for key in first if key.startswith("kernel.")]
    for name in (
        "rms_norm",
        "rms_norm_backward",
        "cross_entropy_in_place",
        "step_control",
        "adamw",
    ):  # adamw: in ztk-update
        assert second[f"kernel.{name}.calls"] >= 1 and second[f"kernel.{name}.ms"] > 0
        assert second[f"kernel.{name}.gb_per_s"] > 0 and f"kernel.{name}.share_of_floor" not in second
        assert summary[f"kernel.{name}.ms"] == second[f"kernel.{name}.ms"]
    assert not [path for kind in ("png", "svg") for path in tmp_path.glob(f"*.{kind}")]
