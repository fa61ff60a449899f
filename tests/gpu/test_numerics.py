"""bf16 logits against transformers in float32, beside transformers' own bf16."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.probe import Probe

pytestmark = pytest.mark.gpu

PROMPT, DECODES, SEQUENCES = 70, 6, 5
FACTOR = 1.25  # of transformers' own bf16 error


def token_ids() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(151936) for _ in range(PROMPT + DECODES)] for _ in range(SEQUENCES)]


def relative(found: torch.Tensor, reference: torch.Tensor) -> float:
    return float((found.double() - reference.double()).norm() / reference.double().norm())


@pytest.fixture(scope="module")
def references(qwen3_0_6b: Path) -> dict[str, torch.Tensor]:
    """Logits [SEQUENCES, DECODES + 1, V] by transformers, from position PROMPT - 1."""
    from transformers import AutoModelForCausalLM

    found = {}
    for dtype in ("float32", "bfloat16"):
        model = AutoModelForCausalLM.from_pretrained(qwen3_0_6b, dtype=dtype).cuda().eval()
        with torch.inference_mode():
            logits = model(torch.tensor(token_ids(), device="cuda")).logits
        found[dtype] = logits[:, PROMPT - 1 :].float()
        del model
    torch.cuda.empty_cache()
    return found


@pytest.fixture(scope="module")
def compile_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared by the cases: eager and captured forms compile the same code."""
    return tmp_path_factory.mktemp("compile-cache")


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
