"""Each check of ``moe_layer.comm.validation`` says which tensor, what it is and what it should be."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from moe_layer.comm.validation import check_combine, check_dispatch
from moe_layer.errors import TensorError

ROWS = torch.zeros(3, 8)
IDS = torch.zeros(3, 2, dtype=torch.int32)
WEIGHTS = torch.zeros(3, 2)
META = torch.device("meta")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_states": [[0.0]]}, "hidden_states is a list; expected a torch.Tensor"),
        ({"hidden_states": torch.tensor(1.0)}, "hidden_states has no dimension; expected [tokens, *row]"),
        ({"hidden_states": torch.zeros(3, 0)}, "hidden_states has shape [3, 0]; expected rows of at least one element"),
        (
            {"hidden_states": torch.zeros(8, 3).t()},
            "hidden_states of shape [3, 8] has strides (1, 3); expected contiguous rows (call .contiguous())",
        ),
        (
            {"hidden_states": torch.zeros(3, 16)[:, :8]},
            "hidden_states of shape [3, 8] has strides (16, 1); expected contiguous rows",
        ),
        ({"hidden_states": torch.eye(3).to_sparse()}, "hidden_states has layout torch.sparse_coo; expected a dense"),
        ({"topk_ids": None}, "topk_ids is a NoneType; expected a torch.Tensor"),
        ({"topk_ids": IDS.to(torch.int16)}, "topk_ids has dtype torch.int16; expected torch.int32 or torch.int64"),
        ({"topk_ids": IDS.flatten()}, "topk_ids has shape [6]; expected [tokens, top_k]"),
        ({"topk_ids": IDS[:2]}, "topk_ids has shape [2, 2]; expected one row for each of the 3 rows of hidden_states"),
        ({"topk_ids": IDS[:, :0]}, "topk_ids has top_k=0; expected 1 to 32"),
        ({"topk_ids": torch.zeros(3, 33, dtype=torch.int64)}, "topk_ids has top_k=33; expected 1 to 32"),
        ({"topk_ids": torch.zeros(2, 3, dtype=torch.int32).t()}, "topk_ids of shape [3, 2] has strides (1, 3)"),
        ({"topk_ids": IDS.to(META)}, "topk_ids is on meta; expected cpu, as hidden_states"),
        ({"topk_weights": [0.5]}, "topk_weights is a list; expected a torch.Tensor"),
        ({"topk_weights": WEIGHTS.bfloat16()}, "topk_weights has dtype torch.bfloat16; expected torch.float32"),
        ({"topk_weights": WEIGHTS[:, :1]}, "topk_weights has shape [3, 1]; expected the shape of topk_ids, [3, 2]"),
        ({"topk_weights": torch.zeros(2, 3).t()}, "topk_weights of shape [3, 2] has strides (1, 3)"),
        ({"topk_weights": WEIGHTS.to(META)}, "topk_weights is on meta; expected cpu, as hidden_states"),
        ({"hidden_states_scale": 1.0}, "hidden_states_scale is a float; expected a torch.Tensor"),
        ({"hidden_states_scale": torch.tensor(1.0)}, "hidden_states_scale has no dimension; expected [tokens, *row]"),
        (
            {"hidden_states_scale": torch.zeros(4, 1)},
            "hidden_states_scale has shape [4, 1]; expected one row for each of the 3 rows of hidden_states",
        ),
        ({"hidden_states_scale": torch.zeros(2, 3).t()}, "hidden_states_scale of shape [3, 2] has strides (1, 3)"),
        ({"hidden_states_scale": torch.zeros(3, 1).to(META)}, "hidden_states_scale is on meta; expected cpu"),
        ({"device": META}, "hidden_states is on cpu; expected meta, as the channel"),
    ],
)
def test_dispatch(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"hidden_states": ROWS, "topk_ids": IDS, "topk_weights": WEIGHTS, **changes}
    with pytest.raises(TensorError, match=re.escape("rank 5: " + message)):
        check_dispatch(5, **arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"topk_ids": IDS.long(), "topk_weights": None},
        {"topk_ids": torch.zeros(3, 32, dtype=torch.int32), "topk_weights": torch.zeros(3, 32)},
        {"hidden_states_scale": torch.zeros(3, 0)},
        {"hidden_states_scale": torch.zeros(3)},
        {"hidden_states": torch.zeros(3, dtype=torch.uint8)},
        {"hidden_states": torch.zeros(0, 8), "topk_ids": IDS[:0], "topk_weights": WEIGHTS[:0]},
    ],
)
def test_dispatch_accepts(arguments: dict[str, Any]) -> None:
    check_dispatch(0, **{"hidden_states": ROWS, "topk_ids": IDS, "topk_weights": WEIGHTS, **arguments})


OUTPUT = torch.zeros(6, 4, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("expert_output", "output", "message"),
    [
        (None, None, "expert_output is a NoneType; expected a torch.Tensor"),
        (OUTPUT.half(), None, "expert_output has dtype torch.float16; expected torch.bfloat16 or torch.float32"),
        (OUTPUT[:5], None, "expert_output has shape [5, 4]; expected [ep_size*T̂, hidden_size] = [6, 4]"),
        (torch.zeros(4, 6).t(), None, "expert_output of shape [6, 4] has strides (1, 6); expected contiguous rows"),
        (OUTPUT.to(META), None, "expert_output is on meta; expected cpu, as hidden_states"),
        (OUTPUT, 0.0, "output is a float; expected a torch.Tensor"),
        (
            OUTPUT,
            torch.zeros(2, 4, dtype=torch.float64),
            "output has dtype torch.float64; expected torch.bfloat16, tor",
        ),
        (OUTPUT, torch.zeros(3, 4), "output has shape [3, 4]; expected [T, hidden_size] = [2, 4]"),
        (OUTPUT, torch.zeros(2, 4).to(META), "output is on meta; expected cpu, as hidden_states"),
    ],
)
def test_combine(expert_output: Any, output: Any, message: str) -> None:
    sizes: dict[str, Any] = {"num_slots": 6, "num_tokens": 2, "hidden_size": 4, "device": torch.device("cpu")}
    with pytest.raises(TensorError, match=re.escape("rank 5: " + message)):
        check_combine(5, expert_output, output, **sizes)


def test_combine_accepts() -> None:
    sizes: dict[str, Any] = {"num_slots": 6, "num_tokens": 2, "hidden_size": 4, "device": torch.device("cpu")}
    check_combine(0, OUTPUT, torch.zeros(4, 2, dtype=torch.float16).t(), **sizes)
    check_combine(0, OUTPUT.float(), None, **sizes)
