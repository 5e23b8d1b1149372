"""Documents 000 and 001: the scripts as they stand. They name no optimizer: DeepSpeed refuses to train there, ztk takes AdamW."""

import pytest

from tests.documents.comparing import compared, learns
from tests.documents.harness import Run, config_of

DATA = "torch.manual_seed(torch.initial_seed() % 2)\n    x = torch.randn(32, 784)"  # a batch of its own per rank, always the same


@pytest.mark.parametrize("name", ["000_ds_config_zero2.json", "000_ds_config_zero3.json"])
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_document_000(documents, name, dtype):
    more = {} if dtype == "fp16" else {"fp16": {"enabled": False}}
    work = Run(
        block="000_train_zero.py",
        argv=("--deepspeed_config", "ds_config.json"),
        config=config_of(name, **more),
        replace={"range(100)": "range(24)", "x = torch.randn(32, 784)": DATA},
    )
    assert learns(compared(documents, work, dtype=dtype), by=0.5)


BLOCKS = {"001_2_1_zero1.py": 1, "001_2_2_zero2.py": 2, "001_2_3_zero3.py": 3}
HUB = {".cuda()": ".to(model.device)", "(0, 50257,": "(0, 64,"}
EXAMPLE = "# 학습 예제"


@pytest.mark.parametrize("block", BLOCKS)
def test_document_001(documents, block):
    """The blocks take one step; here the same step is repeated."""
    work = Run(
        block=block,
        names="hub",
        options={"positions": 128},
        replace={
            **HUB,
            "inputs = torch": "torch.manual_seed(torch.initial_seed() % 2)\ninputs = torch",
            "import deepspeed": "import deepspeed, torch",
        },
        repeat=(EXAMPLE, 4),
    )
    assert learns(compared(documents, work), by=0.995)
