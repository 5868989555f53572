"""moe_layer inside Hugging Face transformers.

    from moe_layer.models import transformers_adapter
    transformers_adapter.register()

    # compute
    model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="moe_layer")
    # and expert parallelism
    model = AutoModelForCausalLM.from_pretrained(
        path, experts_implementation="moe_layer",
        distributed_config=DistributedConfig(fsdp_size=8, ep_size=8, ep_implementation="moe_layer"),
    )

Each of the two works without the other. Which registries there are depends on the version of transformers: 5.17 has
those of experts, expert parallelism came later.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from moe_layer.comm.base import ExpertParallelComm
from moe_layer.errors import ConfigError, TensorError
from moe_layer.models.transformers_experts import experts_forward, refuse_gradients
from moe_layer.parallel import ExpertParallel

NAME = "moe_layer"

# Registered thing → module and name of its registry.
REGISTRIES = {
    "experts": ("transformers.integrations.moe", "ExpertsInterface"),
    "fp8_experts": ("transformers.integrations.finegrained_fp8", "FP8ExpertsInterface"),
    "expert_parallel": ("transformers.distributed.expert_parallel", "EPImplementationInterface"),
}


def register(name: str = NAME, **ep_options: Any) -> tuple[str, ...]:
    """Make the library known to transformers, under ``name``.

    Args:
        name: what ``experts_implementation`` and ``ep_implementation`` will call it.
        ep_options: of :class:`~moe_layer.ExpertParallel`: ``max_tokens_per_rank`` (the most tokens, batch × sequence,
            of a forward on any rank; default 4096), ``protocol``, ``timeout_s``.

    Returns:
        what the installed transformers could take, of ``"experts"``, ``"fp8_experts"`` and ``"expert_parallel"``; empty
        where transformers is not installed.
    """
    unknown = set(ep_options) - {"max_tokens_per_rank", "protocol", "timeout_s"}
    if unknown:
        raise ConfigError(f"unknown options {sorted(unknown)}; known: max_tokens_per_rank, protocol, timeout_s")
    registered = []
    for what, (module_name, registry_name) in REGISTRIES.items():
        try:
            module = import_module(module_name)
            registry = getattr(module, registry_name)
        except (ImportError, AttributeError):
            continue
        if what == "expert_parallel":
            registry.register(name, _ep_implementation(module.EPImplementation, ep_options))
        else:
            registry.register(name, experts_forward)
        registered.append(what)
    return tuple(registered)


def _ep_implementation(base: type, options: dict[str, Any]) -> type:
    """transformers' ``EPImplementation`` over our dispatch and combine."""
    # One channel a group, whatever the number of layers: its buffers are shared.
    groups: dict[dist.ProcessGroup, ExpertParallel] = {}

    class MoELayerEP(base):  # type: ignore[misc]
        """Each rank holds whole experts and a batch of its own; tokens travel once to each rank that they need.

        The experts run by whatever ``experts_implementation`` the model has, on the rows that arrived. Where the ranks
        of a TP group share a batch, each brings its slice of it.
        """

        def __init__(self, experts: Any, ep_mesh: Any, tp_mesh: Any) -> None:
            super().__init__(experts, ep_mesh, tp_mesh)
            self.group = ep_mesh.get_group()
            self.first_expert = dist.get_rank(self.group) * self.num_local_experts
            self.comm: ExpertParallelComm | None = None

        def _communicator(self, x: torch.Tensor, top_k: int) -> ExpertParallelComm:
            """Made in the first forward, when the tokens show where the model runs. Collective."""
            if self.group not in groups:
                groups[self.group] = ExpertParallel(self.group, device=x.device, **options)
            self.ep = groups[self.group]
            placement = self.ep.placement(0, self.num_local_experts * self.ep.ep_size)
            comm = self.ep.communicator(placement, x.shape[1])
            comm.reserve(x.shape[1] * x.element_size(), 0, top_k, self._partial_dtype(x.dtype).itemsize)
            return comm

        def _partial_dtype(self, dtype: torch.dtype) -> torch.dtype:
            return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32

        @torch.no_grad()
        def _exchange(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            if self.comm is None:
                self.comm = self._communicator(x, ids.shape[1])
            received = self.comm.dispatch(x.contiguous(), ids.contiguous(), weights.float().contiguous())
            try:
                buffer = self._compute(received, x.dtype)
            except Exception as error:
                self.comm.give_up(error)
                raise
            return self.comm.combine(buffer, output=torch.empty_like(x, memory_format=torch.contiguous_format))

        def _compute(self, received: Any, dtype: torch.dtype) -> torch.Tensor:
            """This rank's experts on the slots that hold a token; their partial results in the combine buffer."""
            assert self.comm is not None
            used = (received.topk_ids >= 0).any(1).nonzero().squeeze(1)
            ids = received.topk_ids[used].long() - self.first_expert
            elsewhere = (ids < 0) | (ids >= self.num_local_experts)
            # transformers' mark for an expert of another rank: local id num_experts, weight 0
            ids = ids.masked_fill(elsewhere, self.num_local_experts)
            weights = received.topk_weights[used].masked_fill(elsewhere, 0.0)
            buffer = self.comm.get_combine_input_buffer(self._partial_dtype(dtype))
            if used.numel():
                output = self.experts_forward(received.hidden_states[used], ids, weights)
                buffer[used] = output.to(buffer.dtype)
            return buffer

        def __call__(
            self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
        ) -> torch.Tensor:
            refuse_gradients(hidden_states)
            if hidden_states.dim() != 2:
                raise TensorError(f"hidden_states must be [T, hidden], got {list(hidden_states.shape)}")
            ranks = self.tp_mesh.size()
            if ranks == 1:
                return self._exchange(hidden_states, top_k_index, top_k_weights)
            # Equal slices, so that the outputs gather evenly; the last may be short or empty.
            tokens = hidden_states.shape[0]
            share = -(-tokens // ranks)
            start = self.tp_mesh.get_local_rank() * share
            mine = slice(start, start + share)
            output = self._exchange(hidden_states[mine], top_k_index[mine], top_k_weights[mine])
            padded = hidden_states.new_zeros(share, hidden_states.shape[1])
            padded[: output.shape[0]] = output
            gathered = hidden_states.new_empty(ranks * share, hidden_states.shape[1])
            dist.all_gather_into_tensor(gathered, padded, group=self.tp_mesh.get_group())
            return gathered[:tokens]

    return MoELayerEP
