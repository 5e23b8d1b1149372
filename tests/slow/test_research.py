"""Research from outside: the example of docs/extending.md and the five of examples/research, from an installed wheel in a folder of their own.

Each is swept over stages 0 and 3 with `offload=nvme` on two ranks, has one digest at both stages, and is in the report of its sweep.
"""

import re
import shlex
import shutil
from pathlib import Path

import pytest

from tests.wheel import CHECKOUT, install_wheel, start
from ztk.report import load

PAGE = CHECKOUT / "docs" / "extending.md"
RESEARCH = CHECKOUT / "examples" / "research"
SMALL = ("logger=disabled", "train.steps=3", "train.micro_batch_size=2", "train.eval_batches=1", "data.seq_len=16")
RANKS = ("launch.ranks=2", "launch.threads=1")
BARS = ("model=vit", "data=bars", "precision=fp32")
CONV = ("model=conv", "loss=smooth", "user.width=8")
EXAMPLES = {  # kind -> files, and words of the command line
    "a convolutional language model with an own loss": (
        ("conv_lm",),
        ("model=conv", "loss=smooth", "user.width=8,12", *SMALL),
    ),
    "a vision transformer on images with an own Dataset": (("vit",), (*BARS, *SMALL[:-1])),
    "an own optimizer": (("conv_lm", "optimizers"), ("optimizer=sign", *CONV, *SMALL)),
    "an own schedule and callback": (("conv_lm", "pace"), ("experiment=paced", *CONV, *SMALL, "train.eval_every=1")),
    "an own task that uses the loop": (("copying",), ("task._target_=copying.main", "task.longest=6,8", *SMALL)),
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The `bin` folder of an environment with only the wheel."""
    return install_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.mark.parametrize("kind", EXAMPLES)
def test_an_example_is_swept_and_reported(installed, tmp_path, show, kind):
    files, words = EXAMPLES[kind]
    shutil.copytree(RESEARCH / "conf", tmp_path / "mine" / "conf")
    for name in files:
        shutil.copy(RESEARCH / f"{name}.py", tmp_path / "mine")
    own = ("--config-dir", "mine/conf")
    swept = ("zero=stage0,stage3", "offload=nvme", f"hydra.sweep.dir={tmp_path / 'sweep'}")
    done = start(installed / "ztk", "-m", *own, *words, *RANKS, *swept, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    runs, _ = load(tmp_path / "sweep")
    assert set(runs["zero.stage"]) == {0, 3} and set(runs["status"]) == {"done"}
    keys = [word.partition("=")[0] for word in words if "," in word]
    digests = runs.groupby(keys or "model._target_")["loss_digest"]
    assert (
        (digests.size() == 2).all()
        and (digests.nunique() == 1).all()
        and digests.ngroups == len(set(runs["loss_digest"]))
    )
    told = start(installed / "python", "-m", "ztk.report", "compare", tmp_path / "sweep", cwd=tmp_path)
    assert told.returncode == 0 and all(f"zero=stage{stage}" in told.stdout for stage in (0, 3)), (
        told.stdout + told.stderr
    )
    lines = sum(len((RESEARCH / f"{name}.py").read_text().splitlines()) for name in files)
    show(
        f"{kind}: {lines} lines in {', '.join(f'{name}.py' for name in files)}; {len(runs)} runs, equal at stages 0 and 3"
    )


def test_a_wrong_declaration_of_an_optimizer_is_refused(installed, tmp_path):
    shutil.copytree(RESEARCH, tmp_path / "mine")
    done = start(
        installed / "ztk",
        "--config-dir",
        "mine/conf",
        *CONV,
        *SMALL,
        "optimizer=normed",
        "optimizer.elementwise=true",
        cwd=tmp_path,
    )
    assert done.returncode == 2 and "optimizer=Normed: it is not elementwise" in done.stderr


def test_the_page_works_as_it_is_written(installed, tmp_path, show):
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    option, module, commands = (
        next(text for kind, text in blocks if kind == wanted) for wanted in ("yaml", "python", "bash")
    )
    (tmp_path / "mine" / "conf" / "model").mkdir(parents=True)
    (tmp_path / "mine" / "conf" / "model" / "conv.yaml").write_text(option)
    (tmp_path / "mine" / "conv_lm.py").write_text(module)
    for line in commands.replace("\\\n", " ").splitlines():
        sweeps = sorted(tmp_path.glob("multirun/*/*"))
        program, *words = shlex.split(line.replace("multirun/DAY/TIME", str(sweeps[-1]) if sweeps else ""))
        more = (*SMALL, *RANKS) if program == "ztk" else ()
        done = start(installed / program, *words, *more, cwd=tmp_path)
        assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
    assert all(f"user.width={width} zero=stage{stage}" in done.stdout for width in (32, 64, 128) for stage in (0, 3))
    show(f"docs/extending.md: {len((option + module).splitlines())} lines")
