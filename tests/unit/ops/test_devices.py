"""What kernels ask of a device."""

from __future__ import annotations

import pytest
import torch

from graphkit import DeviceError
from graphkit.ops.kernels import devices

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (12, 0)], ids=str)
def test_float8_is_refused_where_kernels_cannot_convert_it(capability, monkeypatch):
    monkeypatch.setattr(devices, "_capability", lambda _: capability)
    if capability == (8, 0):
        with pytest.raises(DeviceError, match=r"store_kv: .* 8.9, but cuda:0 has 8.0"):
            devices.check_float8(CUDA, "store_kv")
    else:
        devices.check_float8(CUDA, "store_kv")
    assert devices.has_float8_cvt(CUDA) == (capability > (8, 0))


def test_a_device_without_cuda_runs_the_reference():
    devices.check_float8(torch.device("cpu"), "store_kv")
    assert not devices.has_dependent_launch(torch.device("cpu"))
