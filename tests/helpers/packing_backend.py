"""The PyTorch reference as a backend that wants packed weights, so that packing is tested without a GPU."""

from __future__ import annotations

import gc

import torch

from moe_layer.gemm.reference import ReferenceBackend
from moe_layer.gemm.register_tiles import BLOCK_FORMATS, PACKED_FORMATS, RegisterTiles


class PackingBackend(ReferenceBackend):
    """The reference reads packed weights through ``ExpertWeights.expert``."""

    name = "packing-reference"

    def weight_layout(self, weight_format: str, parts: int, rows: int, columns: int) -> RegisterTiles | None:
        return layout(weight_format, parts, rows, columns)


def layout(weight_format: str, parts: int, rows: int, columns: int) -> RegisterTiles | None:
    """A layout wherever there is one."""
    packed = weight_format in (*PACKED_FORMATS, *BLOCK_FORMATS)
    return RegisterTiles(weight_format, parts, rows, columns) if packed else None


def live_bytes(*, least: int = 0) -> int:
    """Bytes of all tensor storages of at least ``least`` bytes that anything in this process still holds."""
    found = {}
    for thing in gc.get_objects():
        # By type: asking some of torch.distributed's objects for their class warns.
        if issubclass(type(thing), torch.Tensor) and not thing.is_meta and thing.layout == torch.strided:
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(size for size in found.values() if size >= least)
