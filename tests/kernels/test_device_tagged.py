"""References and eager paths of all ops keep to one device: they run on tensors that report a GPU as their device."""

import pytest
import torch

from tests.device_tagged import DeviceMismatch, gpu_tensors
from ztk.kernels import ALL_OPS
from ztk.kernels.launch.machine import MACHINES, assume


@pytest.mark.parametrize("spec", ALL_OPS, ids=lambda spec: spec.name)
def test_plain_torch_paths_run_on_one_device(spec):
    shape = spec.small_shapes[min(1, len(spec.small_shapes) - 1)]
    for function in {spec.reference, spec.eager} - {None}:
        for variant in spec.variants:
            with assume(MACHINES["sm_90"]), gpu_tensors(), torch.no_grad():
                inputs = spec.make_inputs(shape, dtype=spec.dtypes[0], device="cuda:0", **variant)
                outputs = function(**inputs)
                results = outputs if isinstance(outputs, tuple | list) else [outputs]
                assert all(result.is_cuda for result in results if isinstance(result, torch.Tensor)), variant


def test_devices_that_mix_are_noticed():
    with gpu_tensors():
        x, places = torch.ones(3, device="cuda"), torch.arange(3)
        with pytest.raises(DeviceMismatch, match="add: tensors of the GPU and of the CPU"):
            x + places
        assert x.is_cuda and (x + 1).is_cuda and (x + torch.tensor(1.0)).is_cuda and not x.cpu().is_cuda
        assert not x.to("cpu", torch.float64).is_cuda and x.to(torch.float64).is_cuda
        assert x.cpu().tolist() == x.tolist() and places.to("cuda:0").is_cuda
