"""Expert weights that are held only as a kernel reads them, and still load and save as the checkpoint has them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from moe_layer.errors import FormatError, UnrepresentableError
from moe_layer.gemm.register_tiles import RegisterTiles
from moe_layer.gemm.weights import ExpertWeights
from moe_layer.quant import QuantizedTensor
from moe_layer.weights import ExpertStack

logger = logging.getLogger(__name__)


class PackedExpertStack(ExpertStack):
    """Experts packed by a :class:`~moe_layer.gemm.register_tiles.RegisterTiles`, each as soon as all of it is there.

    An expert's stored bytes are held beside the packed ones only until its last part comes, so that loading takes the
    packed weights and one expert (in :meth:`overlapped` two). ``state_dict`` unpacks into new tensors, bit by bit what
    was loaded; ``load_state_dict`` takes the same and packs in place, so a CUDA graph finds the new weights.

    Weights that cannot be packed exactly (:class:`~moe_layer.errors.UnrepresentableError`) are kept as a plain stack
    keeps them, all experts, with a warning; while that happens both lie in memory.

    Args:
        num_experts: local experts.
        tiles: the layout; it knows format, parts, rows and columns.
        device: where the weights lie.

    Attributes:
        data, scale: None while the experts are packed.
        packed, shift, factor: see :class:`~moe_layer.gemm.weights.ExpertWeights`; None where they are not.
    """

    packed: torch.Tensor | None
    shift: torch.Tensor | None
    factor: torch.Tensor | None

    def __init__(self, num_experts: int, tiles: RegisterTiles, device: torch.device | str | None = None) -> None:
        super().__init__(num_experts, tiles.parts, tiles.rows, tiles.columns, tiles.format, "meta")
        self.tiles = tiles
        self._like = super().weights()
        # (data, scale) of experts that lack a part.
        self._staged: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._side: torch.cuda.Stream | None = None  # where experts are packed inside overlapped()
        self._in_use: list[torch.Tensor] = []  # what the side stream still reads
        for name in ("packed", "shift", "factor"):
            self.register_buffer(name, None, persistent=False)
        self._allocate(device)

    def _allocate(self, device: torch.device | str | None) -> None:
        experts, parts = self._like.num_local_experts, self.tiles.parts
        self.data = self.scale = None
        if self.global_scale is not None:
            self.global_scale = torch.empty(experts, parts, device=device)
        self.packed = torch.empty(self.tiles.shape(experts), dtype=torch.uint8, device=device)
        self.shift = torch.zeros(experts, parts, dtype=torch.int32, device=device)
        self.factor = torch.ones(experts, parts, device=device)

    def weights(self) -> ExpertWeights:
        """The buffers as the compute stages take them; of experts that lack a part, whatever."""
        if self.packed is None:
            return super().weights()
        return ExpertWeights(
            self.weight_format, self._like.data, self._like.scale, self.global_scale, self.columns,
            self.tiles, self.packed, self.shift, self.factor,
        )  # fmt: skip

    # ---- one expert ----

    @contextmanager
    def overlapped(self) -> Iterator[None]:
        """Inside, on a GPU, an expert is packed while the next one is copied; for who loads many. Waits at the end.

        Takes the memory of one more expert.
        """
        if self.packed is None or self.packed.device.type != "cuda":
            yield
            return
        self._side = torch.cuda.Stream(self.packed.device)
        try:
            yield
        finally:
            self._side.synchronize()
            self._side = None
            self._in_use.clear()

    def staging(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(data, scale) of all parts of an expert as the format stores them, to be written, then :meth:`commit`-ted.

        They hold what was loaded so far.
        """
        if self.packed is None:
            assert self.data is not None and self.scale is not None
            return self.data[expert], self.scale[expert]
        if expert not in self._staged:
            if self._is_complete(expert):
                assert self.shift is not None
                self._staged[expert] = self.tiles.unpack(self.packed[expert], self.shift[expert])
            else:
                assert self._like.scale is not None
                self._staged[expert] = (
                    torch.empty_like(self._like.data[expert], device=self.packed.device),
                    torch.empty_like(self._like.scale[expert], device=self.packed.device),
                )
        return self._staged[expert]

    def commit(self, expert: int, *, name: str = "weight") -> None:
        """Pack an expert whose staged tensors (and ``global_scale``) are written. Waits for the device.

        Raises:
            FormatError: scales that give no value; the expert then counts as not loaded.
        """
        if self._side is None or self.packed is None:
            self._pack(expert, name)
            return
        # Before the expert before the last one is forgotten, whose memory may then be written again.
        self._side.synchronize()
        self._in_use = list(self.staging(expert))
        self._side.wait_stream(torch.cuda.current_stream(self.packed.device))
        with torch.cuda.stream(self._side):
            self._pack(expert, name)
        if self.packed is None:  # kept plain: what is copied next goes where the side stream has just written
            self._side.synchronize()

    def _pack(self, expert: int, name: str) -> None:
        parts = {(expert, part) for part in range(self.tiles.parts)}
        self.unloaded -= parts
        if self.packed is None:
            return
        assert self.shift is not None and self.factor is not None
        staged = self.staging(expert)
        try:
            _, shift = self.tiles.pack(*staged, out=self.packed[expert])
            given = None if self.global_scale is None else self.global_scale[expert]
            factor = self.tiles.epilogue_factor(shift, given)
        except UnrepresentableError as error:
            self._keep_plain(f"{name}: {error}")
            return
        except FormatError as error:
            self.unloaded |= parts
            del self._staged[expert]
            raise FormatError(f"{name}: {error}") from None
        del self._staged[expert]
        self.shift[expert], self.factor[expert] = shift, factor

    def load_expert(self, expert: int, part: int, q: QuantizedTensor, *, name: str = "weight") -> None:
        """As :meth:`ExpertStack.load_expert`; packs the expert if this is its last part.

        Raises:
            CheckpointError: another format, shape or dtype; a missing scale.
            FormatError: scales that give no value.
        """
        if self.packed is None:
            super().load_expert(expert, part, q, name=name)
            return
        sources = [source for _, source in self._matched(self.weights(), q, name)]
        targets = [tensor[part] for tensor in self.staging(expert)]
        if self.global_scale is not None:
            targets.append(self.global_scale[expert, part])
        for target, source in zip(targets, sources):
            target.copy_(source)
        self.unloaded.discard((expert, part))
        if self._is_complete(expert):
            self.commit(expert, name=name)

    def _is_complete(self, expert: int) -> bool:
        return not any((expert, part) in self.unloaded for part in range(self.tiles.parts))

    # ---- all experts ----

    def adopt(self, weights: ExpertWeights, *, name: str = "experts") -> None:
        """As :meth:`ExpertStack.adopt`: packed weights without a copy; others are packed, beside the given ones.

        Raises:
            CheckpointError: another format, shape or dtype than this stack's.
            FormatError: scales that give no value.
        """
        self._check_all(weights, name)
        if weights.tiles == self.tiles:
            self.data = self.scale = None
            self.global_scale, self.packed = weights.global_scale, weights.packed
            self.shift, self.factor = weights.shift, weights.factor
            self._staged.clear()
            self.unloaded.clear()
            return
        plain = weights.unpacked()
        self._pack_all(plain, plain.data.device, name)
        if self.packed is None:
            self.data, self.scale = plain.data, plain.scale

    def _pack_all(self, plain: ExpertWeights, device: torch.device, name: str) -> None:
        """Copy all of ``plain``, on any device, into this stack on ``device``."""
        if self.packed is None or self.packed.device != device:
            self._allocate(device)
        if self.global_scale is not None and plain.global_scale is not None:
            self.global_scale.copy_(plain.global_scale)
        self._staged.clear()
        self.unloaded = {(e, p) for e in range(plain.num_local_experts) for p in range(plain.parts)}
        for expert in range(plain.num_local_experts):
            sources = plain.stored(expert)
            for target, source in zip(self.staging(expert), sources):
                assert source is not None
                target.copy_(source)
            self.commit(expert, name=f"{name}, local expert {expert}")

    def _plain(self) -> ExpertWeights:
        """All experts as the format stores them, in new tensors."""
        plain = self.weights().unpacked()
        for expert, (data, scale) in self._staged.items():
            assert plain.scale is not None
            plain.data[expert], plain.scale[expert] = data, scale
        return plain

    def _keep_plain(self, reason: str) -> None:
        plain = self._plain()
        self.data, self.scale = plain.data, plain.scale
        self.packed = self.shift = self.factor = None
        self._staged.clear()
        logger.warning("%s; these %s experts are not packed for the kernel", reason, self.weight_format)

    # ---- torch's hooks ----

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> PackedExpertStack:
        super()._apply(fn, recurse)
        self._staged = {expert: (fn(data), fn(scale)) for expert, (data, scale) in self._staged.items()}
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        if self.packed is None:
            super()._save_to_state_dict(destination, prefix, keep_vars)
            return
        plain = self._plain()
        for name in ("data", "scale", "global_scale"):
            if (tensor := getattr(plain, name)) is not None:
                destination[prefix + name] = tensor

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any
    ) -> None:
        # A plain stack without memory takes the tensors as they are, once it has found nothing wrong with them.
        found = ExpertStack(
            self._like.num_local_experts, self.tiles.parts, self.rows, self.columns, self.weight_format, "meta"
        )
        found._load_from_state_dict(state_dict, prefix, {**local_metadata, "assign_to_params_buffers": True}, *args)
        if not any(buffer.is_meta for buffer in found.buffers()):
            plain = found.weights()
            device = plain.data.device if self.device.type == "meta" else self.device
            self._pack_all(plain, device, prefix.rstrip("."))


def make_stack(
    num_experts: int,
    parts: int,
    rows: int,
    columns: int,
    weight_format: str,
    device: torch.device | str | None = None,
    tiles: RegisterTiles | None = None,
) -> ExpertStack:
    """A stack of experts, packed if there are ``tiles``."""
    if tiles is None:
        return ExpertStack(num_experts, parts, rows, columns, weight_format, device)
    return PackedExpertStack(num_experts, tiles, device)
