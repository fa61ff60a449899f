"""attention=flash4 on a Hopper or Blackwell GPU with flash-attn-4 installed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.attention.flash4 import PAGE_MULTIPLE
from engine.attention.obstacles import flash4_obstacle
from tests.support.attention import build_case
from tests.support.numerics import FACTOR, PROMPT, relative, token_ids
from tests.support.probe import Probe

pytestmark = pytest.mark.gpu

SPANS = {
    "decode": [(1, 1), (255, 1), (256, 1), (1030, 1)],
    "prompts": [(0, 1), (0, 64), (0, 129), (0, 300)],
    "chunks": [(5, 60), (64, 64), (200, 57), (1000, 130)],
    "mixed": [(700, 1), (33, 1), (64, 65), (0, 200), (0, 1)],
}


@pytest.fixture(autouse=True)
def _can_run() -> None:
    capability = torch.cuda.get_device_capability()
    obstacle = flash4_obstacle(PAGE_MULTIPLE, 128, "bfloat16", capability)
    if obstacle is not None:
        pytest.skip(obstacle)


@pytest.mark.parametrize("spans", SPANS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(16, 8), (32, 8), (8, 8)])
def test_like_float64(spans: str, heads: int, kv_heads: int, dtype: torch.dtype) -> None:
    """NaN in every place that is not a sequence's own, past its end in its last page too."""
    case = build_case(SPANS[spans], PAGE_MULTIPLE, heads, kv_heads, 128, dtype).to("cuda")
    bound = 2 * torch.finfo(dtype).eps
    found = case.attend("flash4").double()
    torch.testing.assert_close(found, case.expected, atol=bound, rtol=bound)


@pytest.mark.parametrize("eager", [True, False])
def test_logits_are_as_near_float32_as_transformers(
    qwen3_0_6b: Path, references: dict[str, torch.Tensor], eager: bool
) -> None:
    probe = Probe(qwen3_0_6b, attention="flash4", enforce_eager=eager)
    own = probe.teacher_forced(token_ids(), PROMPT)
    probe.close()
    assert own is not None
    exact = references["float32"]
    theirs = relative(references["bfloat16"], exact)
    print(f"flash4: relative error {relative(own, exact):.2e}, theirs {theirs:.2e}")
    assert relative(own, exact) <= FACTOR * theirs
