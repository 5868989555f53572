"""Model shapes against the paper's Table 3 and the sizes that `doctor` gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_layer import doctor
from moe_layer.benchmarks.shapes import ALL_TO_ALL, SHAPES, get_shape
from moe_layer.errors import ConfigError, FormatError
from moe_layer.models.synthetic import write_checkpoint


@pytest.mark.parametrize(
    ("text", "dispatch", "combine"),
    [  # paper, Table 3 and Table A.5; V3 by hand
        ("deepseek_v41", 5328, 10240),
        ("deepseek_v41:bf16", 10288, 10240),
        ("deepseek_v41:fp8", 5328, 10240),
        ("kimi_k3", 3824, 7168),
        ("kimi_k3:bf16", 7296, 7168),
        ("deepseek_v3:bf16", 14336 + 64, 14336),
        ("deepseek_v3", 7168 + 224 + 64, 14336),
    ],
)
def test_bytes_of_a_token(text: str, dispatch: int, combine: int) -> None:
    shape = get_shape(text)
    assert (shape.dispatch_bytes, shape.combine_bytes) == (dispatch, combine)
    assert get_shape(shape.label) == shape


# Of the releases' config.json: routed width, expert width, experts, top_k; and the activation format they imply.
RELEASES = {
    "deepseek_v3": (7168, 2048, 256, 8, "fp8"),
    "deepseek_v4": (4096, 2048, 256, 6, "mxfp8"),
    "deepseek_v4_pro": (7168, 3072, 384, 6, "mxfp8"),
    "deepseek_v41": (5120, 2304, 384, 6, "mxfp8"),
    "kimi_k2": (7168, 2048, 384, 8, "fp8"),
    "kimi_k2_thinking": (7168, 2048, 384, 8, "bf16"),
    "kimi_linear": (2304, 1024, 256, 8, "bf16"),
    "kimi_k3": (3584, 3072, 896, 16, "mxfp8"),
}


def test_releases() -> None:
    assert {
        name: (s.hidden_size, s.intermediate_size, s.num_experts, s.top_k, s.activation_format)
        for name, s in SHAPES.items()
    } == RELEASES
    assert all(get_shape(text).label == text for text in ALL_TO_ALL)


@pytest.mark.parametrize("name", RELEASES)
def test_doctor_sizes_known_models(name: str) -> None:
    sized = doctor.workspace(name, ep_size=2, max_tokens_per_rank=16)
    hidden, _, _, top_k, implied = RELEASES[name]
    assert (sized["model"], sized["hidden_size"], sized["top_k"], sized["activation_format"]) == (
        name, hidden, top_k, implied,
    )  # fmt: skip


def test_a_checkpoint_is_a_shape(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "k3", "kimi_k3", hidden=512, inter=128, latent=256, experts=64, top_k=16).path
    shape = get_shape(str(path))
    assert (shape.hidden_size, shape.intermediate_size, shape.num_experts, shape.top_k) == (256, 128, 64, 16)
    assert (shape.weight_format, shape.activation_format) == ("mxfp4", "mxfp8")
    assert get_shape(f"{path}:bf16").data_bytes == 512


def test_errors() -> None:
    with pytest.raises(ConfigError, match=r"unknown model 'gpt': neither a checkpoint here nor one of .*kimi_k3"):
        get_shape("gpt")
    with pytest.raises(FormatError, match="unknown format 'fp6'"):
        get_shape("kimi_k3:fp6")
    with pytest.raises(ConfigError, match="'fp8_128x128' cannot carry activations"):
        get_shape("kimi_k3:fp8_128x128")
