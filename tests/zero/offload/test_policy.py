"""Values that cannot work are refused with key, value and fix."""

import pytest

from ztk.core.runtime import Tier
from ztk.zero.offload import OffloadPolicy


def test_words_become_targets() -> None:
    policy = OffloadPolicy(optimizer="cpu")
    assert policy.optimizer is Tier.cpu and policy.parameters is Tier.none and not policy.uses_nvme


def test_pool_bytes_count_buffers_and_one_block_per_thread() -> None:
    policy = OffloadPolicy(
        optimizer="nvme", nvme_path="x", buffer_count=5, buffer_bytes=1 << 20, block_bytes=8 << 20, threads=3
    )
    assert policy.pool_bytes == 5 * (1 << 20) + 3 * (1 << 20)


@pytest.mark.parametrize(
    ("fields", "texts"),
    [
        ({"optimizer": "disk"}, ("offload.optimizer=disk", "none, cpu, nvme")),
        ({"parameters": "nvme"}, ("offload.nvme_path", "offload.nvme_path=FOLDER")),
        ({"buffer_count": 2}, ("offload.buffer_count=2", "3 or more")),
        ({"buffer_bytes": 5000}, ("offload.buffer_bytes=5000", "offload.buffer_bytes=8192")),
        ({"block_bytes": 0}, ("offload.block_bytes=0", "4096 or more")),
        ({"threads": 0}, ("offload.threads=0", "1 or more")),
        ({"threads": 100_000}, ("offload.threads=100000", "at most 1024")),
    ],
)
def test_refusals(fields: dict, texts: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as caught:
        OffloadPolicy(**fields)
    assert all(text in str(caught.value) for text in texts), str(caught.value)
