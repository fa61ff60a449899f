"""Rotary base and scaling: what is read of a config, and the table against transformers' own."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.resolve import resolve
from engine.rope import RopeScaling, rotary_table
from tests.support.configs import ABSENT, read

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
THETA = 1e6  # of the config that `read` changes; its max_position_embeddings are 40960


def scaling(**changes: Any) -> RopeScaling:
    defaults: dict[str, Any] = {"kind": "yarn", "factor": 4.0, "original": 32768}
    return RopeScaling(**{**defaults, **changes})


def in_transformers(
    rope: dict[str, Any], head_dim: int = 16, max_position: int = 64, theta: float = 1e4
) -> Any:
    """transformers' rotary embedding of a Qwen3 with this scaling."""
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    return Qwen3RotaryEmbedding(
        Qwen3Config(
            head_dim=head_dim,
            max_position_embeddings=max_position,
            rope_theta=theta,
            rope_scaling=dict(rope),
        )
    )


def rows_of(rotary: Any, positions: list[int]) -> torch.Tensor:
    """-> [positions, D] as in our table: cos of each pair, then sin, all of one call."""
    cos, sin = rotary(torch.empty(0), torch.tensor([positions]))
    half = cos.shape[-1] // 2
    return torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1)


def ours(
    folder: Path, rope: dict[str, Any], head_dim: int, max_position: int, theta: float
) -> torch.Tensor:
    """Our table of the same model, read from its config.json."""
    shape = read(
        folder,
        head_dim=head_dim,
        max_position_embeddings=max_position,
        rope_theta=theta,
        rope_scaling=rope,
    )
    return rotary_table(shape.head_dim, shape.longest, shape.rope_theta, shape.rope)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 3},
        {"rope_type": "yarn", "factor": 4.0},
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32},
        {"rope_type": "yarn", "factor": 3.0, "attention_factor": 0.7},
        {"rope_type": "yarn", "factor": 3.0, "beta_fast": 4, "beta_slow": 0.5},
        {"rope_type": "yarn", "factor": 3.0, "truncate": False},
        {"rope_type": "yarn", "factor": 3.0, "mscale": 0.707, "mscale_all_dim": 1.2},
        {"rope_type": "yarn", "factor": 3.0, "mscale": 2.0},
        {"rope_type": "yarn", "factor": 1.0, "mscale": 2.0, "mscale_all_dim": 1.0},
        # The ramp's end past the last pair, and past D; both ends at the same pair.
        {"rope_type": "yarn", "factor": 3.0, "beta_fast": 4.0, "beta_slow": 1e-3},
        {"rope_type": "yarn", "factor": 3.0, "beta_fast": 4.0, "beta_slow": 1e-8},
        {"rope_type": "yarn", "factor": 3.0, "beta_fast": 10, "beta_slow": 10, "truncate": False},
    ],
    ids=lambda rope: "-".join(map(str, rope.values())),
)
@pytest.mark.parametrize(("head_dim", "theta"), [(16, 1e4), (128, 1e6)])
def test_table_is_transformers(
    tmp_path: Path, rope: dict[str, Any], head_dim: int, theta: float
) -> None:
    table = ours(tmp_path, rope, head_dim, 64, theta)
    expected = rows_of(in_transformers(rope, head_dim, 64, theta), list(range(len(table))))
    torch.testing.assert_close(table, expected, atol=2e-5, rtol=0)


def test_table_of_the_published_yarn_recipe(tmp_path: Path) -> None:
    """Qwen's own: factor 4 over 32768 in a config of 40960 positions. The factor counts, not the
    ratio of the two lengths, which transformers 4 took."""
    import transformers

    table = ours(tmp_path, YARN, 128, 40960, THETA)
    assert len(table) == 131_072
    positions = [0, 1, 1000, 32_767, 32_768, 40_960, 131_071]
    if transformers.__version__.startswith("5."):
        expected = rows_of(in_transformers(YARN, 128, 40960, THETA), positions)
        torch.testing.assert_close(table[positions], expected, atol=1e-5, rtol=0)
    # Pair 0 turns 5215 times within 32768 positions: unscaled. The last one 0.006 times: / 4.
    slowest = THETA ** (-126 / 128) / 4
    angles = torch.tensor(positions, dtype=torch.float64)[:, None] * torch.tensor([1.0, slowest])
    factor = 1.1386294361119891  # 0.1 ln(4) + 1
    expected = torch.cat((angles.cos(), angles.sin()), dim=-1) * factor
    found = table[positions][:, [0, 63, 64, 127]].double()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_dynamic_table_is_transformers_fed_token_by_token(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0}
    table = ours(tmp_path, rope, 16, 64, 1e4)
    assert len(table) == 256
    rotary = in_transformers(rope)
    expected = torch.cat([rows_of(rotary, [p]) for p in range(256)])
    torch.testing.assert_close(table, expected, atol=5e-5, rtol=0)
    plain = rotary_table(16, 256, 1e4, None)
    assert torch.equal(table[:64], plain[:64])
    assert (table[64:] - plain[64:]).abs().amax(dim=-1).min() > 1e-3
    assert torch.equal(rotary_table(16, 50, 1e4, scaling(kind="dynamic", original=64)), plain[:50])


# -- where it stands ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, None),
        ({"rope_scaling": {"type": "default"}}, None),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, ("linear", 2.0, 40960)),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.5}}, ("dynamic", 2.5, 40960)),
        ({"rope_scaling": YARN}, ("yarn", 4.0, 32768)),
        ({"rope_scaling": {**YARN, "type": "yarn"}}, ("yarn", 4.0, 32768)),
        ({"rope_scaling": YARN, "rope_parameters": YARN}, ("yarn", 4.0, 32768)),
        ({"rope_parameters": {**YARN, "rope_theta": THETA}}, ("yarn", 4.0, 32768)),
        (
            {"rope_theta": ABSENT, "rope_parameters": {**YARN, "rope_theta": THETA}},
            ("yarn", 4.0, 32768),
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, ("yarn", 4.0, 40960)),
        (
            {"rope_scaling": {**YARN, "factor": None, "original_max_position_embeddings": 10240}},
            ("yarn", 4.0, 10240),
        ),
        (
            {
                "rope_scaling": {"type": "yarn", "factor": 4},
                "original_max_position_embeddings": 32768,
            },
            ("yarn", 4.0, 32768),
        ),
    ],
)
def test_old_and_new_places_are_read(
    tmp_path: Path, changes: dict[str, Any], expected: tuple[str, float, int] | None
) -> None:
    shape = read(tmp_path, **changes)
    assert shape.rope_theta == THETA
    found = shape.rope and (shape.rope.kind, shape.rope.factor, shape.rope.original)
    assert found == expected
    if expected is not None and expected[0] == "yarn":
        assert shape.rope is not None
        assert shape.rope.attention_factor == pytest.approx(1.1386294361119891, rel=1e-15)
    assert pickle.loads(pickle.dumps(shape)) == shape
    assert len({shape, read(tmp_path, **changes)}) == 1, "hashable, by value"


@pytest.mark.parametrize(
    ("rope", "named"),
    [
        ({"rope_type": "longrope", "factor": 4.0}, "'longrope': implemented are default, linear"),
        ({"rope_type": "llama3", "factor": 8.0}, "'llama3': implemented .* dynamic, yarn"),
        ({"rope_type": "proportional"}, "'proportional': implemented"),
        ({"type": "mrope", "mrope_section": [16, 24, 24]}, "'mrope': implemented"),
        ({"rope_type": ["yarn"]}, r"\['yarn'\]: implemented"),
        ({"rope_type": "default", "mrope_section": [16, 24, 24]}, "'default' has no mrope_section"),
        ({"rope_type": "default", "factor": 4.0}, "'default' has no factor"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 1}, "'linear' has no beta_fast"),
        ({"rope_type": "yarn", "type": "linear", "factor": 2.0}, "different rope types"),
        ({"factor": 4.0}, "no rope_type: add one of default, linear, dynamic, yarn"),
        ({"rope_type": "linear"}, "has no factor: add it"),
        ({"rope_type": "yarn"}, "has no factor: add it"),
        (
            {"rope_type": "yarn", "original_max_position_embeddings": 81920},
            "no factor, and the lengths in it give 0.5: add one of at least 1",
        ),
        ({"rope_type": "linear", "factor": "4.0"}, "factor='4.0' must be a number of at least 1"),
        ({"rope_type": "dynamic", "factor": 0.5}, "factor=0.5 must be a number of at least 1"),
        ({"rope_type": "linear", "factor": float("inf")}, "factor=inf must be"),
        ({**YARN, "factor": True}, "factor=True must be"),
        ({**YARN, "attention_factor": 0}, "attention_factor=0 must be a number above 0"),
        ({**YARN, "beta_fast": 1, "beta_slow": 2}, "beta_fast=1.0 must not be below beta_slow=2.0"),
        ({**YARN, "truncate": "no"}, "truncate='no' must be true or false"),
        ({**YARN, "original_max_position_embeddings": 1.5}, "embeddings=1.5 must be a whole"),
        ([4.0], r"rope_scaling=\[4.0\] is not an object"),
    ],
)
def test_refuses_by_name(tmp_path: Path, rope: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read(tmp_path, rope_scaling=rope)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope_scaling": YARN, "rope_theta": ABSENT}, "no rope_theta"),
        ({"rope_theta": "1e6"}, "rope_theta='1e6' must be a number above 0"),
        (
            {"rope_scaling": YARN, "rope_parameters": {"rope_type": "default"}},
            "different rotary scalings",
        ),
        (
            {"rope_scaling": YARN, "rope_parameters": {**YARN, "factor": 2.0}},
            "different rotary scalings",
        ),
        (
            {"rope_scaling": YARN, "original_max_position_embeddings": 4096},
            "different original_max_position_embeddings",
        ),
        ({"partial_rotary_factor": 0.5}, "config.json: partial_rotary_factor=0.5"),
        ({"head_dim": 2, "rope_scaling": {"type": "dynamic", "factor": 2}}, "head_dim above 2"),
    ],
)
def test_refuses_contradictions(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read(tmp_path, **changes)


# -- how long a request may be --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rope", "by_default", "limit"),
    [
        (None, 40960, 40960),
        ({"type": "linear", "factor": 2.5}, 102_400, 102_400),
        ({"type": "dynamic", "factor": 2.0}, 40960, 81_920),
        ({"type": "yarn", "factor": 4.0}, 163_840, 163_840),
        (YARN, 131_072, 131_072),
        ({**YARN, "factor": 1.0}, 32_768, 32_768),
    ],
)
def test_longest_request(
    tmp_path: Path,
    rope: dict[str, Any] | None,
    by_default: int,
    limit: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    shape = read(tmp_path, rope_scaling=rope)

    def resolved(max_model_len: int | None) -> int:
        config = EngineConfig(
            model="", device="cpu", enforce_eager=True, max_model_len=max_model_len
        )
        return resolve(config, shape).max_model_len

    assert resolved(None) == by_default
    assert not caplog.records
    assert resolved(limit) == limit
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == (by_default < limit)
    assert all("past 40960 positions dynamic rope scaling" in message for message in warned)
    with pytest.raises(ConfigError, match=f"max_model_len={limit + 1}: .* end at {limit}"):
        resolved(limit + 1)
