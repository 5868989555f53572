"""Which experts a token goes to, and with which weights (DeepSeek-V2/V3/V4, Kimi, Qwen3-MoE, Mixtral)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from moe_layer.config import MoEConfig
from moe_layer.errors import CheckpointError, ConfigError, TensorError
from moe_layer.gemm.matmul import row_matmul
from moe_layer.gemm.router_launch import RouterKernels, usable
from moe_layer.gemm.router_spec import RouterModel
from moe_layer.gemm.rowwise import row_sum, sigmoid, softmax, softplus

# DeepSeek's reference adds it to the sum of the chosen weights before dividing.
NORM_EPSILON = 1e-20


def router_model(cfg: MoEConfig) -> RouterModel:
    """What the router's kernels need to know of a model."""
    return RouterModel(
        cfg.n_routed_experts, cfg.hidden_size, cfg.num_experts_per_tok, cfg.n_group, cfg.topk_group, cfg.group_score,
        cfg.scoring_func, cfg.norm_topk_prob, float(cfg.routed_scaling_factor), cfg.use_correction_bias,
    )  # fmt: skip


class Router(nn.Module):
    """Scores, choice and weights in fp32.

    Scores are ``softmax``, ``sigmoid`` or ``√softplus`` of the logits ``x·Wᵀ``. The choice is by score plus
    ``e_score_correction_bias``, within the best ``topk_group`` groups; the weights are the scores alone, normalised and
    scaled. Equal scores go to the lower expert id. A NaN score is never preferred: it counts as −∞ in the choice, keeps
    its NaN in the weights, and ids stay in range, so a NaN token spoils its own row of the output only.

    BF16 rows on a Hopper GPU take two kernels (:mod:`moe_layer.gemm.router_launch`), all else PyTorch. Both compute in
    fp32, in different order. The kernels read the weights in a form derived from them at the first step after a change,
    which waits for the device once; a CUDA graph keeps the form that it was captured with.

    Args:
        cfg: the model; ``scoring_func``, ``n_group``, ``topk_group``, ``group_score``, ``norm_topk_prob``,
            ``routed_scaling_factor``, ``use_correction_bias``, ``num_hash_layers`` are read.
        layer: decoder layer; the first ``num_hash_layers`` look experts up by token id.

    Attributes:
        weight: ``[n_routed_experts, hidden_size]`` fp32.
        e_score_correction_bias: ``[n_routed_experts]`` fp32, or None.
        bias_vl: the same for image tokens, or None; a checkpoint that holds it brings it (DeepSeek-V4.1).
        tid2eid: ``[vocab_size, top_k]`` int32 experts of each token id (hash layers), or None.
    """

    e_score_correction_bias: torch.Tensor | None
    bias_vl: torch.Tensor | None
    tid2eid: torch.Tensor | None

    def __init__(
        self,
        cfg: MoEConfig,
        *,
        layer: int = 0,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        experts, top_k = cfg.n_routed_experts, cfg.num_experts_per_tok
        reachable = experts // cfg.n_group * cfg.topk_group
        if reachable < top_k:
            raise ConfigError(
                f"{cfg.model_type}: topk_group={cfg.topk_group} of n_group={cfg.n_group} groups hold {reachable} "
                f"experts, fewer than num_experts_per_tok={top_k}"
            )
        self.cfg = cfg
        self._looked_at: tuple[tuple[int, int], ...] = ()
        self._model = router_model(cfg)
        self._kernels: RouterKernels | None = None
        # What the kernels were made from. Holding its storage keeps its address from being given to other weights.
        self._kernels_of: tuple[torch.Tensor, int] | None = None
        self.is_hash = cfg.is_hash_layer(layer)
        if self.is_hash and cfg.vocab_size < 1:
            raise ConfigError(f"{cfg.model_type}: layer {layer} is a hash layer, but vocab_size is {cfg.vocab_size}")
        # fp32 whatever the checkpoint holds: the products are fp32, and widening once is exact. NaN until loaded.
        self.weight = nn.Parameter(
            torch.full((experts, cfg.hidden_size), torch.nan, device=device), requires_grad=False
        )
        has_bias = cfg.use_correction_bias and not self.is_hash
        self.register_buffer("e_score_correction_bias", torch.zeros(experts, device=device) if has_bias else None)
        self.register_buffer("bias_vl", None)
        table = torch.zeros(cfg.vocab_size, top_k, dtype=torch.int32, device=device) if self.is_hash else None
        self.register_buffer("tid2eid", table)

    @torch.no_grad()
    def load(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        bias_vl: torch.Tensor | None = None,
        tid2eid: torch.Tensor | None = None,
    ) -> None:
        """Copy a checkpoint's tensors into place.

        Args:
            weight: ``[n_routed_experts, hidden_size]``, any floating dtype.
            bias, bias_vl: ``[n_routed_experts]``, likewise.
            tid2eid: ``[vocab_size, top_k]`` integers.

        Raises:
            CheckpointError: a wrong shape, or a tensor that this router needs, or has no use for.
        """
        self._make_room(bias_vl)
        for name, target, source in (
            ("gate.weight", self.weight, weight),
            ("gate.e_score_correction_bias", self.e_score_correction_bias, bias),
            ("gate.bias_vl", self.bias_vl, bias_vl),
            ("gate.tid2eid", self.tid2eid, tid2eid),
        ):
            if (target is None) != (source is None):
                raise CheckpointError(f"{name} is {'missing' if source is None else 'not expected'}")
            if target is None or source is None:
                continue
            if source.shape != target.shape:
                raise CheckpointError(f"{name} is {list(source.shape)}, expected {list(target.shape)}")
            target.copy_(source)

    def check_loaded(self) -> None:
        """Raise unless every value is finite: NaN until loaded. One look after each change of the tensors.

        Raises:
            CheckpointError: no weights yet, or a checkpoint with NaN or Inf in them.
        """
        tensors = {
            "weight": self.weight,
            "e_score_correction_bias": self.e_score_correction_bias,
            "bias_vl": self.bias_vl,
        }
        state = tuple((t.data_ptr(), t._version) for t in tensors.values() if t is not None)
        if state == self._looked_at:
            return
        for name, tensor in tensors.items():
            if tensor is not None and not bool(torch.isfinite(tensor).all()):
                raise CheckpointError(
                    f"gate.{name} holds NaN or Inf: never loaded, or loaded from a damaged checkpoint"
                )
        self._looked_at = state

    def _make_room(self, bias_vl: torch.Tensor | None) -> None:
        self.bias_vl = None if bias_vl is None else torch.empty(self.weight.shape[0], device=self.weight.device)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self._make_room(state_dict.get(prefix + "bias_vl"))
        super()._load_from_state_dict(state_dict, prefix, *args)

    @torch.no_grad()
    def forward(
        self, x: torch.Tensor, input_ids: torch.Tensor | None = None, image_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose experts.

        Args:
            x: ``[T, hidden_size]``, any floating dtype.
            input_ids: ``[T]`` integer token ids; hash layers need them, others ignore them.
            image_mask: ``[T]`` bool, True for image tokens; None means there are none. Without ``bias_vl`` they
                choose as all others do.

        Returns:
            ids ``[T, top_k]`` int32, best first, and their weights ``[T, top_k]`` fp32.

        Raises:
            TensorError: a wrong shape or dtype, missing ``input_ids``, a token id outside the table.
        """
        cfg = self.cfg
        if x.dim() != 2 or x.shape[1] != cfg.hidden_size or not x.is_floating_point():
            raise TensorError(f"router input must be [T, {cfg.hidden_size}] floating, got {list(x.shape)} {x.dtype}")
        if not self.is_hash and x.dtype == torch.bfloat16 and x.device == self.weight.device and usable(x.device):
            kernels = self._derived()
            if kernels is not None:
                if image_mask is not None and self.bias_vl is not None:
                    self._check_mask(x.shape[0], image_mask)
                    if image_mask.device == x.device:
                        return kernels(x, self.e_score_correction_bias, self.bias_vl, image_mask.contiguous())
                else:
                    return kernels(x, self.e_score_correction_bias)
        scores = self._scores(row_matmul(x.float(), self.weight.float()))
        ids = self._look_up(x.shape[0], input_ids) if self.is_hash else self._choose(scores, image_mask)
        weights = scores.gather(1, ids)
        if cfg.norm_topk_prob:
            weights = weights / (row_sum(weights).unsqueeze(1) + NORM_EPSILON)
        return ids.int(), weights * cfg.routed_scaling_factor

    def _derived(self) -> RouterKernels | None:
        """The kernels with the weights as they are now, or None where the kernels do not serve this model."""
        weight = self.weight
        tensors = [t for t in (weight, self.e_score_correction_bias, self.bias_vl) if t is not None]
        plain = all(t.dtype == torch.float32 and t.is_contiguous() and t.data_ptr() % 16 == 0 for t in tensors)
        if not self._model.supported or not plain:
            return None
        source = self._kernels_of
        current = source is not None and (source[0].data_ptr(), source[1]) == (weight.data_ptr(), weight._version)
        if self._kernels is None or not current:
            self._kernels, self._kernels_of = RouterKernels(self._model, weight), (weight.detach(), weight._version)
        return self._kernels

    def _scores(self, logits: torch.Tensor) -> torch.Tensor:
        if self.cfg.scoring_func == "softmax":
            return softmax(logits)
        if self.cfg.scoring_func == "sigmoid":
            return sigmoid(logits)
        return softplus(logits).sqrt()

    def _choose(self, scores: torch.Tensor, image_mask: torch.Tensor | None) -> torch.Tensor:
        """``[T, E]`` scores → ``[T, top_k]`` int64 ids."""
        cfg = self.cfg
        choice = scores
        if self.e_score_correction_bias is not None:
            choice = choice + self._bias(scores.shape[0], image_mask)
        # + 0.0 turns −0.0 into +0.0, which a sort by bit pattern would rank lower.
        choice = torch.where(choice.isnan(), -torch.inf, choice) + 0.0
        if cfg.n_group > 1:
            grouped = choice.view(-1, cfg.n_group, cfg.n_routed_experts // cfg.n_group)
            if cfg.group_score == "max":
                group_scores = grouped.amax(-1)
            else:
                group_scores = row_sum(grouped.topk(min(2, grouped.shape[2]), dim=-1).values)
            kept = torch.zeros_like(group_scores, dtype=torch.bool)
            kept.scatter_(1, _best(group_scores, cfg.topk_group), True)
            choice = grouped.masked_fill(~kept.unsqueeze(2), -torch.inf).view_as(choice)
        return _best(choice, cfg.num_experts_per_tok)

    def _bias(self, tokens: int, image_mask: torch.Tensor | None) -> torch.Tensor:
        bias = self.e_score_correction_bias
        assert bias is not None
        if self.bias_vl is None or image_mask is None:
            return bias
        self._check_mask(tokens, image_mask)
        return torch.where(image_mask.unsqueeze(1), self.bias_vl, bias)

    def _check_mask(self, tokens: int, image_mask: torch.Tensor) -> None:
        if image_mask.shape != (tokens,) or image_mask.dtype != torch.bool:
            raise TensorError(f"image_mask must be [{tokens}] bool, got {list(image_mask.shape)} {image_mask.dtype}")

    def _look_up(self, tokens: int, input_ids: torch.Tensor | None) -> torch.Tensor:
        table = self.tid2eid
        assert table is not None
        if input_ids is None:
            raise TensorError("this layer chooses experts by token id (hash routing): pass input_ids")
        if input_ids.shape != (tokens,) or input_ids.dtype not in (torch.int32, torch.int64):
            raise TensorError(
                f"input_ids must be [{tokens}] int32 or int64, got {list(input_ids.shape)} {input_ids.dtype}"
            )
        bad = input_ids[(input_ids < 0) | (input_ids >= table.shape[0])]
        if bad.numel():
            raise TensorError(f"input_ids holds {int(bad[0])}, outside the vocabulary of {table.shape[0]}")
        return table[input_ids.long()].long()


def _best(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Indices of the k largest along the last dimension, ties to the lower index (``topk`` leaves them open)."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]
