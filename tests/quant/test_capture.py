"""Fit for CUDA graphs, as far as that shows without a GPU: nothing is read back and no tensor is made elsewhere.

Meta tensors have no values, so any read of one raises; the mode below sees every tensor that is made on the way.
tests/gpu/test_quant.py captures and replays for real.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moe_layer.quant import available_formats, get_format, validate_scales


class Devices(TorchDispatchMode):
    """Where the results of all operations live."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.seen[leaf.device.type] = str(func)
        return result


@pytest.mark.parametrize("shape", [(0, 65), (1, 1), (130, 256), (130, 259)])
@pytest.mark.parametrize("name", available_formats())
def test_nothing_is_read_back_or_made_on_the_host(name, shape):
    fmt = get_format(name)
    x = torch.empty(shape, device="meta")
    with Devices() as devices:
        q = fmt.quantize(x)
        if fmt.is_activation_format:
            q = fmt.from_wire(*fmt.to_wire(q), shape[1])
        values = [fmt.dequantize(q, dtype) for dtype in (torch.float32, torch.bfloat16)]
    assert set(devices.seen) <= {"meta"}, devices.seen
    assert all(v.shape == shape and v.device.type == "meta" for v in values)


def test_the_check_can_fail():
    q = get_format("mxfp4").quantize(torch.empty(4, 64, device="meta"))
    with pytest.raises((NotImplementedError, RuntimeError)):
        validate_scales(q, "reads values, as documented")
    with Devices() as devices:
        torch.tensor([1.0]).add(1)
    assert set(devices.seen) == {"cpu"}
