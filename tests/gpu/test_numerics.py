"""bf16 logits against transformers in float32, beside transformers' own bf16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.numerics import FACTOR, PROMPT, relative, token_ids
from tests.support.probe import Probe

pytestmark = pytest.mark.gpu

# All backends stand behind the same operator, so one of them suffices in every compiled form.
MODES = [("auto", scope) for scope in ("off", "layer", "model")]
MODES += [(backend, "off") for backend in ("flash2", "triton", "sdpa")]


@pytest.mark.parametrize(("attention", "scope"), MODES)
@pytest.mark.parametrize("eager", [True, False])
def test_logits_are_as_near_float32_as_transformers(
    qwen3_0_6b: Path,
    references: dict[str, torch.Tensor],
    attention: str,
    scope: str,
    eager: bool,
    compile_cache: Path,
) -> None:
    options: dict[str, Any] = {"attention": attention, "compile": scope, "enforce_eager": eager}
    probe = Probe(qwen3_0_6b, cache_dir=str(compile_cache), **options)
    own = probe.teacher_forced(token_ids(), PROMPT)
    probe.close()
    assert own is not None
    exact = references["float32"]
    theirs, ours = relative(references["bfloat16"], exact), relative(own, exact)
    agree = float((own.argmax(-1) == exact.argmax(-1)).float().mean())
    print(f"{options}: relative error {ours:.2e}, transformers {theirs:.2e}, greedy {agree:.2f}")
    assert ours <= FACTOR * theirs
    assert not own.isnan().any()
