"""The router on Hopper: weights as BF16 terms, launching the two kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from moe_layer.gemm.router_spec import (
    MAX_TERMS,
    ChoiceSpec,
    LogitsSpec,
    RouterModel,
    choice_spec,
    choose_logits,
    logits_specs,
)
from moe_layer.kernel_cache import anchor, dsl_available, get_kernel

ARCH, CAPABILITY = "sm_90a", (9, 0)
LOGITS_SIGNATURE, CHOICE_SIGNATURE = "lllli", "lllllli"
# Rows are routed in chunks of this many, so that the partial logits take at most 235 MB (Kimi-K3).
CHUNK = 16384
UPPER_HALF = -65536  # as int32: sign, exponent and the upper 7 bits of the fraction, which is BF16


def split_weight(weight: torch.Tensor) -> torch.Tensor:
    """FP32 weights as sums of BF16 terms, largest first; terms that are all zero are left out, except the first.

    Each term takes the leading 8 significant bits of what is left (truncation, so that the largest FP32 number does not
    round to infinity); three hold FP32's 24. The sum is exact where BF16 can hold the last bit, that is for magnitudes
    of at least 2⁻¹¹⁰ (BF16 and FP32 have the same exponents); of smaller ones what lies below 2⁻¹³³ is dropped.

    Args:
        weight: ``[E, hidden]`` fp32.

    Returns:
        ``[terms, E, hidden]`` BF16, 1 … 3 terms. Waits for the device.
    """
    rest = weight.detach().float().contiguous()
    terms = []
    for _ in range(MAX_TERMS):
        term = (rest.view(torch.int32) & UPPER_HALF).view(torch.float32)
        # Of NaN and infinity nothing is left over.
        term = torch.where(rest.isfinite(), term, rest)
        terms.append(term.bfloat16())
        rest = torch.where(term.isfinite(), rest - term, torch.zeros_like(rest))
    while len(terms) > 1 and not bool(terms[-1].any()):
        terms.pop()
    return torch.stack(terms)


def logits_kernel(spec: LogitsSpec) -> Callable[..., None]:
    """The compiled launch function, from memory, disk or the compiler."""
    from moe_layer.gemm.router_logits import router_logits

    return get_kernel(router_logits, spec, LOGITS_SIGNATURE, ARCH)


def choice_kernel(spec: ChoiceSpec, arch: str = ARCH) -> Callable[..., None]:
    """The same for a choice kernel, which runs on any architecture."""
    from moe_layer.gemm.router_choice import router_choice

    return get_kernel(router_choice, spec, CHOICE_SIGNATURE, arch)


def router_kernels(model: RouterModel, terms: int, image_biased: bool) -> list[Callable[..., None]]:
    """Every kernel of a router, for any number of tokens.

    Args:
        terms: BF16 terms of its weights.
        image_biased: also those for steps with image tokens that have a bias of their own.
    """
    logits = logits_specs(model, terms).values()
    choices = {choice_spec(model, spec, image_biased=i): None for spec in logits for i in {False, image_biased}}
    return [logits_kernel(spec) for spec in logits] + [choice_kernel(spec) for spec in choices]


@cache
def usable(device: torch.device) -> bool:
    """Whether a device can run the kernels: Hopper, and the CuTe DSL is installed."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == CAPABILITY and dsl_available()


class RouterKernels:
    """A router's kernels and the derived form of its weights.

    Args:
        model: a supported one.
        weight: ``[E, hidden]`` fp32 on a Hopper GPU; later changes of it are not seen.
    """

    def __init__(self, model: RouterModel, weight: torch.Tensor) -> None:
        self.model = model
        self.terms = split_weight(weight)
        self._anchor = anchor(weight.device)
        self._kernels: dict[Any, tuple[LogitsSpec, Callable[..., None], Callable[..., None]]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of a router makes its own: compiled kernels cannot be copied."""
        return type(None), ()

    def __call__(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None = None,
        image_bias: torch.Tensor | None = None,
        image_mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose experts: two launches on torch's current stream, nothing waits for the device.

        Args:
            x: ``[T, hidden]`` BF16.
            bias: ``[E]`` fp32, contiguous; given exactly where the model has one.
            image_bias, image_mask: ``[E]`` fp32 and ``[T]`` bool, contiguous: that bias for the tokens of the mask.

        Returns:
            ids ``[T, top_k]`` int32 and weights ``[T, top_k]`` fp32.
        """
        tokens, top_k = x.shape[0], self.model.top_k
        ids = torch.empty(tokens, top_k, dtype=torch.int32, device=x.device)
        weights = torch.empty(tokens, top_k, dtype=torch.float32, device=x.device)
        if x.stride(1) != 1 or x.stride(0) % 8 or x.stride(0) < x.shape[1] or x.data_ptr() % 16:  # TMA's conditions
            x = x.contiguous()
        images = image_bias is not None and image_mask is not None
        for start in range(0, tokens, CHUNK):
            count = min(CHUNK, tokens - start)
            spec, logits, choice = self._kernels_for(count, images)
            partials = torch.empty(spec.parts, count, spec.columns, dtype=torch.float32, device=x.device)
            logits(
                self._anchor, self.terms.data_ptr(), x.data_ptr() + start * x.stride(0) * 2,
                max(x.stride(0), x.shape[1]) // 8, partials.data_ptr(), count,
            )  # fmt: skip
            choice(
                self._anchor, partials.data_ptr(), 0 if bias is None else bias.data_ptr(),
                image_bias.data_ptr() if images and image_bias is not None else 0,
                image_mask.data_ptr() + start if images and image_mask is not None else 0,
                ids.data_ptr() + start * top_k * 4, weights.data_ptr() + start * top_k * 4, count,
            )  # fmt: skip
        return ids, weights

    def _kernels_for(self, tokens: int, images: bool) -> tuple[LogitsSpec, Callable[..., None], Callable[..., None]]:
        spec = choose_logits(self.model, self.terms.shape[0], tokens)
        found = self._kernels.get((spec.tokens, spec.cluster, images))
        if found is None:
            choice = choice_kernel(choice_spec(self.model, spec, image_biased=images))
            found = self._kernels[spec.tokens, spec.cluster, images] = (spec, logits_kernel(spec), choice)
        return found
