"""The scripts in examples/ work: each is started by the command lines of its own docstring, and learns."""

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[1]
EXAMPLES = {path.stem: path for path in sorted((CHECKOUT / "examples").glob("*.py"))}
START = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run"]}


def commands_of(path: Path) -> list[list[str]]:
    """The command lines in its docstring, as arguments."""
    lines = [line.strip() for line in ast.get_docstring(ast.parse(path.read_text())).splitlines()]
    commands = [shlex.split(line, comments=True) for line in lines if line.startswith(("python ", "torchrun "))]
    assert commands, f"{path.name} does not say how it is started"
    return commands


def run_example(name: str, *, cwd: Path) -> list[str]:
    """The output of each of its commands, run one after the other in the same folder."""
    printed = []
    for starter, *words in commands_of(EXAMPLES[name]):
        command = [*START[starter], *(str(CHECKOUT / word) if word.startswith("examples/") else word for word in words)]
        plain = {"PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=cwd, env=os.environ | plain, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    return printed


def losses_of(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"\bloss'?:? '?([\d.]+)", text)]


@pytest.mark.parametrize("name", ["deepspeed_script", "library", "trainer"])
def test_it_learns(name, tmp_path):
    (text,) = run_example(name, cwd=tmp_path)
    losses = losses_of(text)
    assert len(losses) >= 3 and losses[-1] < losses[0] / 2
    if name == "trainer":
        from transformers import LlamaForCausalLM

        trained = LlamaForCausalLM.from_pretrained(tmp_path / "outputs" / "trainer")
        assert not any(parameter.isnan().any() for parameter in trained.parameters())


def test_a_tensor_plan_splits_the_layers_and_keeps_the_loss(tmp_path):
    split, alone = run_example("tensor_plan", cwd=tmp_path)
    assert "layers.0.up.weight [96, 32]: [48, 32]" in split and "layers.0.up.weight [96, 32]: [96, 32]" in alone
    # Before the first update the two differ by the order of fp32 sums over 96 products: 96 * 2^-24 of a loss of about 4, less than the
    # last digit that is printed, which may be rounded to either side.
    assert losses_of(split)[0] == pytest.approx(losses_of(alone)[0], abs=1.5e-4)
    assert losses_of(split)[-1] < losses_of(split)[0] / 2


def test_a_run_resumes_under_another_layout(tmp_path):
    first, second = run_example("resume", cwd=tmp_path)
    assert "continues" not in first and "continues after step 10, saved by 2 ranks" in second
    before, after = losses_of(first), losses_of(second)
    assert (len(before), len(after)) == (10, 10)
    assert after[0] < before[-2] and after[-1] < before[-1] / 2  # a model that began anew would stand at before[0]


def test_every_example_is_run():
    assert sorted(EXAMPLES) == ["deepspeed_script", "library", "resume", "tensor_plan", "trainer"]
