"""Small random checkpoints in every release layout, with the values that their tensors stand for.

For tests, ``moe-layer demo`` and benchmarks. The values are computed from the formats' definitions by
:mod:`moe_layer.models.synthetic_formats`, which shares no code with the loader or the quantizers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from moe_layer.errors import ConfigError
from moe_layer.models.synthetic_releases import RELEASES, Release, Sizes


@dataclass
class LayerValues:
    """fp32 values of one MoE layer, exactly what its stored tensors mean.

    Attributes:
        gate, up: ``[E, inter, width]``; width is the latent one where there is one, else hidden.
        down: ``[E, width, inter]``.
        input_scales: ``[E, 3]`` factors of the inputs of gate, up, down (NVFP4), or None.
        router: ``[E, hidden]``; router_bias and router_bias_vl: ``[E]`` or None.
        tid2eid: ``[vocab, top_k]`` int64 (hash layers) or None.
        shared_gate, shared_up: ``[shared inter, hidden]``, shared_down: ``[hidden, shared inter]``, or None.
        latent_down: ``[latent, hidden]``, latent_norm: ``[latent]``, latent_up: ``[hidden, latent]``, or None.
    """

    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    router: torch.Tensor
    input_scales: torch.Tensor | None = None
    router_bias: torch.Tensor | None = None
    router_bias_vl: torch.Tensor | None = None
    tid2eid: torch.Tensor | None = None
    shared_gate: torch.Tensor | None = None
    shared_up: torch.Tensor | None = None
    shared_down: torch.Tensor | None = None
    latent_down: torch.Tensor | None = None
    latent_norm: torch.Tensor | None = None
    latent_up: torch.Tensor | None = None


@dataclass
class SyntheticCheckpoint:
    """What :func:`write_checkpoint` wrote.

    Attributes:
        path: the folder.
        config: contents of ``config.json``.
        moe_layers: indices of the MoE layers, hash-routed ones first.
        values: layer → its values; empty if not asked for.
        tensors: names of all tensors → file.
    """

    path: Path
    config: dict[str, Any]
    moe_layers: list[int]
    values: dict[int, LayerValues] = field(default_factory=dict)
    tensors: dict[str, str] = field(default_factory=dict)


def write_checkpoint(
    folder: str | os.PathLike[str],
    family: str,
    *,
    hidden: int = 256,
    inter: int = 128,
    experts: int = 8,
    top_k: int = 2,
    layers: int = 1,
    seed: int = 0,
    shards: int = 1,
    latent: int | None = None,
    vocab: int = 64,
    groups: bool = True,
    config: Mapping[str, Any] | None = None,
    values: bool = True,
) -> SyntheticCheckpoint:
    """Write a random checkpoint.

    Args:
        folder: made if missing.
        family: a key of :data:`~moe_layer.models.synthetic_releases.RELEASES`.
        hidden, inter, experts, top_k: the model's dimensions.
        layers: MoE layers that are not hash-routed; the release's dense and hash layers come before them.
        seed: of everything random.
        shards: files; more than one makes an index.
        latent: width of a latent MoE; None means ``hidden // 2`` where the release has one.
        vocab: vocabulary, rows of the hash layers' tables.
        groups: limit the choice to half of the expert groups where the release does, if the number of experts allows.
        config: fields that replace those of the (text) config.
        values: compute what the tensors stand for (slow for large ones).

    Raises:
        ConfigError: an unknown family.
    """
    if family not in RELEASES:
        raise ConfigError(f"unknown release {family!r}; known: {', '.join(sorted(RELEASES))}")
    release = RELEASES[family]
    n_group = _groups(experts, top_k) if groups else 1
    before = release.first_dense + release.hash_layers
    sizes = Sizes(
        hidden=hidden,
        inter=inter,
        experts=experts,
        top_k=top_k,
        num_layers=before + layers,
        latent=(latent or hidden // 2) if release.latent else None,
        vocab=vocab,
        n_group=n_group,
        topk_group=max(1, n_group // 2),
        hash_layers=release.hash_layers,
    )
    contents = json.loads(json.dumps(release.config(sizes)))  # a copy: configs share parts
    contents.get("text_config", contents).update(config or {})

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    moe_layers = list(range(release.first_dense, sizes.num_layers))
    tensors, meanings = _outside(release, sizes, rng), {}
    for layer in moe_layers:
        stored, meaning = _Layer(release, sizes, layer, rng, values).write()
        tensors.update(stored)
        if meaning is not None:
            meanings[layer] = meaning
    files = _save(folder, tensors, shards)
    (folder / "config.json").write_text(json.dumps(contents, indent=2) + "\n", encoding="utf-8")
    if release.hf_quant_config is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps(release.hf_quant_config, indent=2), encoding="utf-8")
    return SyntheticCheckpoint(folder, contents, moe_layers, meanings, files)


def _groups(experts: int, top_k: int) -> int:
    """The most groups, at most V3's eight, of at least two experts, half of which hold ``top_k``."""
    for count in (8, 4, 2):
        if experts % count == 0 and experts // count >= 2 and experts // 2 >= top_k:
            return count
    return 1


def _outside(release: Release, sizes: Sizes, rng: np.random.Generator) -> dict[str, torch.Tensor]:
    """Tensors that are no part of an MoE block, a few of each kind, as a reader has to pass over them."""
    embed = rng.standard_normal((sizes.vocab, sizes.hidden), dtype=np.float32)
    root = release.block.split("layers.")[0]
    tensors = {f"{root}embed_tokens.weight": torch.from_numpy(embed).to(torch.bfloat16)}
    for layer in range(sizes.num_layers):
        tensors[f"{root}layers.{layer}.input_layernorm.weight"] = torch.ones(sizes.hidden, dtype=torch.bfloat16)
    for layer in range(release.first_dense):
        stored, _ = release.shared(rng, sizes.inter, sizes.hidden, False)
        tensors.update({f"{root}layers.{layer}.mlp.gate_proj.{k}": v for k, v in stored.items()})
    return tensors


class _Layer:
    """Writes one MoE block."""

    def __init__(self, release: Release, sizes: Sizes, layer: int, rng: np.random.Generator, values: bool) -> None:
        self.release, self.sizes, self.rng, self.values = release, sizes, rng, values
        self.block = release.block.format(layer=layer)
        self.is_hash = layer < release.hash_layers
        self.tensors: dict[str, torch.Tensor] = {}

    def write(self) -> tuple[dict[str, torch.Tensor], LayerValues | None]:
        release, s = self.release, self.sizes
        router = self._put("gate.weight", self._normal((s.experts, s.hidden), s.hidden**-0.5).to(torch.bfloat16))
        bias = bias_vl = table = None
        if self.is_hash:
            ids = self.rng.permuted(np.tile(np.arange(s.experts), (s.vocab, 1)), axis=1)[:, : s.top_k]
            table = self._put("gate.tid2eid", torch.from_numpy(np.ascontiguousarray(ids)))
        elif release.bias:
            # as large as the differences between scores, so that leaving it out changes the choice
            bias = self._put(release.bias, self._normal((s.experts,), 0.2))
        if release.bias_vl:
            bias_vl = self._put("gate.bias_vl", self._normal((s.experts,), 0.2))
        routed, scales = self._experts(s.latent or s.hidden)
        shared = self._shared()
        latent = self._latent()
        if not self.values:
            return self.tensors, None
        return self.tensors, LayerValues(
            gate=routed[0],
            up=routed[1],
            down=routed[2],
            router=router.float(),
            input_scales=scales,
            router_bias=bias,
            router_bias_vl=bias_vl,
            tid2eid=table,
            shared_gate=shared[0],
            shared_up=shared[1],
            shared_down=shared[2],
            latent_down=latent[0],
            latent_norm=latent[1],
            latent_up=latent[2],
        )

    def _put(self, relative: str, tensor: torch.Tensor) -> torch.Tensor:
        self.tensors[f"{self.block}.{relative}"] = tensor
        return tensor

    def _normal(self, shape: tuple[int, ...], deviation: float) -> torch.Tensor:
        return torch.from_numpy(self.rng.standard_normal(shape, dtype=np.float32) * np.float32(deviation))

    def _experts(self, width: int) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """Every expert's gate, up and down: values ``[E, N, K]`` of each, and the input scales ``[E, 3]``."""
        s, release = self.sizes, self.release
        shapes = ((s.inter, width), (s.inter, width), (width, s.inter))
        stacks: list[list[torch.Tensor]] = [[], [], []]
        scales = []
        for expert in range(s.experts):
            row = []
            for projection, (name, (rows, columns)) in enumerate(zip(release.names, shapes)):
                # fused weights are plain: what is written below are the values
                stored, meaning = release.routed(self.rng, rows, columns, self.values or release.fused)
                if not release.fused:
                    for suffix, tensor in stored.items():
                        self._put(f"experts.{expert}.{name}.{suffix}", tensor)
                if meaning is not None:
                    stacks[projection].append(torch.from_numpy(meaning))
                if "input_scale" in stored:
                    row.append(stored["input_scale"].item())
                elif "input_global_scale" in stored:
                    row.append(1.0 / stored["input_global_scale"].item())
            if row:
                scales.append(row)
        out = [torch.stack(stack) if stack else torch.empty(0) for stack in stacks]
        if release.fused:
            self._put("experts.gate_up_proj", torch.cat(out[:2], dim=1).to(torch.bfloat16))
            self._put("experts.down_proj", out[2].to(torch.bfloat16))
        return out, torch.tensor(scales) if scales else None

    def _shared(self) -> list[torch.Tensor | None]:
        s, release = self.sizes, self.release
        width = release.num_shared * s.inter
        out: list[torch.Tensor | None] = [None, None, None]
        if width:
            shapes = ((width, s.hidden), (width, s.hidden), (s.hidden, width))
            for projection, (name, (rows, columns)) in enumerate(zip(release.shared_names, shapes)):
                stored, meaning = release.shared(self.rng, rows, columns, self.values)
                for suffix, tensor in stored.items():
                    self._put(f"shared_experts.{name}.{suffix}", tensor)
                out[projection] = None if meaning is None else torch.from_numpy(meaning)
        return out

    def _latent(self) -> list[torch.Tensor | None]:
        s = self.sizes
        if s.latent is None:
            return [None, None, None]
        down = self._normal((s.latent, s.hidden), s.hidden**-0.5).to(torch.bfloat16)
        norm = (1 + self._normal((s.latent,), 0.1)).to(torch.bfloat16)
        up = self._normal((s.hidden, s.latent), s.latent**-0.5).to(torch.bfloat16)
        self._put("routed_expert_down_proj.weight", down)
        self._put("routed_expert_norm.weight", norm)
        self._put("routed_expert_up_proj.weight", up)
        return [down.float(), norm.float(), up.float()]


def _save(folder: Path, tensors: dict[str, torch.Tensor], shards: int) -> dict[str, str]:
    """Split in order, so that a layer and even a matrix and its scale may lie in different files."""
    names = list(tensors)
    if shards == 1:
        save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
        return dict.fromkeys(names, "model.safetensors")
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = names[i * len(names) // shards : (i + 1) * len(names) // shards]
        save_file({n: tensors[n] for n in part}, str(folder / file), metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    total = sum(t.nbytes for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return weight_map
