"""Logits of a 0.6B model by transformers, and how far others are from them."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch

from harness.machine.models import built
from tests.support.once import one_at_a_time

PROMPT, DECODES, SEQUENCES = 70, 6, 5
FACTOR = 1.25  # of transformers' own bf16 error


def token_ids() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(151936) for _ in range(PROMPT + DECODES)] for _ in range(SEQUENCES)]


def relative(found: torch.Tensor, reference: torch.Tensor) -> float:
    return float((found.double() - reference.double()).norm() / reference.double().norm())


def logits_by_transformers(path: Path) -> dict[str, torch.Tensor]:
    """By dtype, float32 and bfloat16, the float32 logits [SEQUENCES, DECODES + 1, V] on the GPU
    from position PROMPT - 1. Computed once for a checkpoint, a GPU and versions, and kept (43 MB
    beside the checkpoint)."""
    import transformers

    recipe = json.dumps([
        str(path), (path / "model.safetensors").stat().st_mtime_ns, token_ids(), PROMPT,
        torch.__version__, transformers.__version__, torch.cuda.get_device_name(),
    ])  # fmt: skip
    with one_at_a_time("test-logits"):
        folder = built(f"{path.name}-logits", recipe, lambda target: _write(path, target))
    found: dict[str, torch.Tensor] = torch.load(folder / "logits.pt", map_location="cuda")
    return found


def _write(path: Path, target: Path) -> None:
    from transformers import AutoModelForCausalLM

    found = {}
    for dtype in ("float32", "bfloat16"):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).cuda().eval()
        with torch.inference_mode():
            logits = model(torch.tensor(token_ids(), device="cuda")).logits
        found[dtype] = logits[:, PROMPT - 1 :].float().cpu()
        del model
    torch.cuda.empty_cache()
    torch.save(found, target / "logits.pt")
