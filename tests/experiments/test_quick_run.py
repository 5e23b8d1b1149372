"""`train.quick=true`: the steps of a run and nothing after them."""

import json

from experiments import pretrain
from ztk.config import Machine, compose
from ztk.runtime import Process

WORDS = (
    "model=nano",
    "data=files",
    "data.seq_len=32",
    "train.steps=2",
    "train.micro_batch_size=1",
    "logger=disabled",
    "train.quick=true",
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
    assert not [path for kind in ("png", "svg") for path in tmp_path.glob(f"*.{kind}")]
