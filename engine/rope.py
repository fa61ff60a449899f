"""Rotary positions: what a config says of base and scaling, and the table of cos and sin.

D is head_dim. At position p, pair i of a head turns by p * f_i, f_i = theta^(-2i/D). A scaling
changes these frequencies for texts longer than the model was trained on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from engine.errors import ConfigError

ROPE_TYPES = ("default", "linear", "dynamic", "yarn")
_PLACES = ("rope_parameters", "rope_scaling")  # of transformers 5 and of 4
_COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_READ_BY = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "yarn": {"factor", "original_max_position_embeddings", "attention_factor", "beta_fast",
             "beta_slow", "mscale", "mscale_all_dim", "truncate"},
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How the rotary frequencies of a model are scaled; a model without a scaling has None.

    linear (position interpolation, Chen et al. 2023, arXiv 2306.15595): every f_i / factor.

    yarn (Peng et al. 2023, arXiv 2309.00071): pairs that turn more than beta_fast times within the
    original positions keep f_i, those that turn less than beta_slow times have f_i / factor, and
    between the two the share of each is linear in i. cos and sin are multiplied by
    attention_factor.

    dynamic (NTK-aware, as in transformers): for a text of n > original tokens theta becomes
    theta * (factor * n / original - factor + 1)^(D / (D-2)). transformers takes for n the length
    that a sequence has when a token is computed, and leaves the keys it has cached as they were
    turned. Here n = p + 1 for the token at position p, so that a key depends on nothing after it:
    neither on how a prompt was cut into steps nor on which request left the page that it is read
    from. Up to the original positions that is transformers' result however it computes it (and the
    result without a scaling); past them it is transformers' result for a sequence fed token by
    token. A prompt longer than that, which transformers turns as a whole by its own length, is
    turned token by token here and gives other logits.

    Attributes:
        kind: linear | dynamic | yarn.
        factor: at least 1; how many times longer than `original` texts may be.
        original: positions before scaling: max_position_embeddings; for yarn its own
            original_max_position_embeddings, where there is one.
        attention_factor, beta_fast, beta_slow: of yarn, see above.
        truncate: of yarn: the ramp begins and ends at whole i, rounded outwards.
    """

    kind: str
    factor: float
    original: int
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    @property
    def limit(self) -> int:
        """Positions that the scaling was made for, as vLLM derives them."""
        return int(self.original * self.factor)


def rotary_table(
    head_dim: int, positions: int, theta: float, scaling: RopeScaling | None
) -> torch.Tensor:
    """-> float32 [positions, D]: row p holds cos, then sin, of p * f_i for i = 0 .. D/2-1."""
    frequencies = _frequencies(head_dim, theta, scaling)  # [D/2]
    if scaling is not None and scaling.kind == "dynamic" and positions > scaling.original:
        known = frequencies.expand(scaling.original, -1)
        frequencies = torch.cat((known, _stretched(head_dim, positions, theta, scaling)))
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    return table if scaling is None else table * scaling.attention_factor


def _frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> torch.Tensor:
    """The frequencies that all positions (of dynamic: the original ones) have, float32 [D/2]."""
    plain = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if scaling is None or scaling.kind == "dynamic":
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor

    def pair(turns: float) -> float:
        """The i, not whole, of the pair that turns so often within the original positions."""
        length = scaling.original / (2 * math.pi * turns)
        return head_dim * math.log(length) / (2 * math.log(theta))

    first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = last - first if last != first else 0.001  # transformers' guard against 0 / 0
    i = torch.arange(head_dim // 2, dtype=torch.float32)
    scaled = ((i - first) / width).clamp(0, 1)  # share of f_i / factor
    return plain / scaling.factor * scaled + plain * (1 - scaled)


def _stretched(head_dim: int, positions: int, theta: float, scaling: RopeScaling) -> torch.Tensor:
    """Frequencies of dynamic's positions past the original ones, float32 [positions - original,
    D/2]; in float64 first, where theta to a power near 1 keeps its digits."""
    n = torch.arange(scaling.original + 1, positions + 1, dtype=torch.float64)
    growth = scaling.factor * n / scaling.original - (scaling.factor - 1)
    bases = theta * growth ** (head_dim / (head_dim - 2))
    powers = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    return (1.0 / bases[:, None] ** powers).float()


def read_rope(
    config: dict[str, Any], head_dim: int, max_position: int
) -> tuple[float, RopeScaling | None]:
    """The rotary base and scaling of a config.json.

    The base stands in `rope_parameters` (transformers 5) or at the top level (4), the scaling in
    `rope_parameters` or in `rope_scaling`, its type under `rope_type` or `type`. Missing values are
    transformers' defaults. Where yarn names both a factor and its original positions, the factor
    counts, as in transformers 5 and vLLM; transformers 4 took max_position / original for it.

    Raises:
        ConfigError: no base; two bases or scalings that differ; a rope type other than ROPE_TYPES
            or a setting that the type does not have, which would change the model unnoticed; a
            value out of its range.
    """
    sections: dict[str, dict[str, Any]] = {}
    for place in _PLACES:
        section = config.get(place) or {}
        if not isinstance(section, dict):
            raise ConfigError(f"{place}={section!r} is not an object with a rope_type")
        if section:
            sections[place] = {k: v for k, v in section.items() if v is not None}
    for place, section in {"config.json": config, **sections}.items():
        if section.get("partial_rotary_factor", 1.0) not in (None, 1.0):
            raise ConfigError(
                f"{place}: partial_rotary_factor={section['partial_rotary_factor']}: only 1.0 is "
                f"implemented"
            )
    scalings = {place: _scaling(place, s, config, max_position) for place, s in sections.items()}
    if len(set(scalings.values())) > 1:
        raise ConfigError(f"config.json has different rotary scalings: {sections}; keep one")
    scaling = next(iter(scalings.values()), None)
    if scaling is not None and scaling.kind == "dynamic" and head_dim <= 2:
        raise ConfigError(f"rope type 'dynamic' needs a head_dim above 2, not {head_dim}")
    return _theta(config, sections), scaling


def _theta(config: dict[str, Any], sections: dict[str, dict[str, Any]]) -> float:
    thetas = {
        f"{place}.rope_theta".removeprefix("config.json."): _number(place, section, "rope_theta")
        for place, section in {"config.json": config, **sections}.items()
        if section.get("rope_theta") is not None
    }
    if not thetas:
        raise ConfigError("config.json has no rope_theta, there or in rope_parameters: add one")
    if len(set(thetas.values())) > 1:
        raise ConfigError(f"config.json has different rotary bases: {thetas}; keep the right one")
    return next(iter(thetas.values()))


def _scaling(
    place: str, section: dict[str, Any], config: dict[str, Any], max_position: int
) -> RopeScaling | None:
    kind = _kind(place, section)
    strangers = sorted(set(section) - _COMMON - _READ_BY[kind])
    if strangers:
        raise ConfigError(f"{place}: rope type {kind!r} has no {', '.join(strangers)}; remove it")
    if kind == "default":
        return None
    if kind != "yarn":
        factor = _number(place, section, "factor", at_least=1)
        return RopeScaling(kind=kind, factor=factor, original=max_position)
    return _yarn(place, section, config.get("original_max_position_embeddings"), max_position)


def _kind(place: str, section: dict[str, Any]) -> str:
    kind = _agreed(place, "rope types", [section.get("rope_type"), section.get("type")])
    if kind is None:
        if set(section) <= _COMMON:
            return "default"
        raise ConfigError(
            f"{place} has {sorted(section)} and no rope_type: add one of {', '.join(ROPE_TYPES)}"
        )
    if kind not in ROPE_TYPES:
        raise ConfigError(
            f"{place} has rope type {kind!r}: implemented are {', '.join(ROPE_TYPES)}"
        )
    return str(kind)


def _yarn(place: str, section: dict[str, Any], at_top: Any, max_position: int) -> RopeScaling:
    name = "original_max_position_embeddings"
    named = _agreed("config.json", name, [section.get(name), at_top])
    original = max_position if named is None else named
    if not isinstance(original, int) or original < 1:
        raise ConfigError(f"{place}: {name}={original!r} must be a whole number")
    ratio = None if named is None else max_position / original
    factor = _number(place, section, "factor", default=ratio, at_least=1)
    mscales = [_number(place, section, n, default=0.0) for n in ("mscale", "mscale_all_dim")]
    # Both or neither, as in transformers: one without the other says nothing.
    over, under = mscales if all(mscales) else (1.0, 0.0)
    paper = (0.1 * over * math.log(factor) + 1) / (0.1 * under * math.log(factor) + 1)
    fast = _number(place, section, "beta_fast", default=32.0)
    slow = _number(place, section, "beta_slow", default=1.0)
    if fast < slow:
        raise ConfigError(f"{place}: beta_fast={fast} must not be below beta_slow={slow}")
    truncate = section.get("truncate", True)
    if not isinstance(truncate, bool):
        raise ConfigError(f"{place}: truncate={truncate!r} must be true or false")
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original=original,
        attention_factor=_number(place, section, "attention_factor", default=paper),
        beta_fast=fast,
        beta_slow=slow,
        truncate=truncate,
    )


def _agreed(place: str, what: str, values: list[Any]) -> Any:
    """The one value that is not None, or None."""
    given = [value for value in values if value is not None]
    if any(value != given[0] for value in given):
        raise ConfigError(f"{place} has different {what}: {given}; keep the right one")
    return given[0] if given else None


def _number(
    place: str,
    section: dict[str, Any],
    name: str,
    *,
    default: float | None = None,
    at_least: float = 0.0,
) -> float:
    """A number above 0 and of at least `at_least`; `default` where there is none."""
    value = section.get(name)
    if value is None:
        value = default
        if value is None:
            raise ConfigError(f"{place} has no {name}: add it")
        if value < at_least:
            raise ConfigError(
                f"{place} has no {name}, and the lengths in it give {value:g}: add one of at least "
                f"{at_least:g}"
            )
        return value
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and math.isfinite(value) and value > 0 and value >= at_least):
        least = f"of at least {at_least:g}" if at_least else "above 0"
        raise ConfigError(f"{place}: {name}={value!r} must be a number {least}")
    return float(value)
