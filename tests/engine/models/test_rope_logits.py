"""Models with a rope scaling against transformers in float32, on both sides of the trained length.

Within the 64 original positions pair 0 of these tiny heads turns 10 times, pair 7 by one degree.
"""

from __future__ import annotations

import inspect
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams
from tests.support.checkpoints import Checkpoints, reference_logits
from tests.support.greedy import greedy_reference
from tests.support.models import Step, logits_of

TOLERANCE = 1e-4
ORIGINAL = 64
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen2": {"model_type": "qwen2", "hidden_size": 64},
}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"type": "linear", "factor": 2.5},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "yarn-ramp": {"rope_type": "yarn", "factor": 2.5, "beta_fast": 2.0, "beta_slow": 0.1,
                  "truncate": False, "mscale": 0.7, "mscale_all_dim": 1.5},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
}  # fmt: skip


def scaled(checkpoints: Checkpoints, scaling: str, **model: Any) -> Path:
    rope = SCALINGS[scaling]
    given = "original_max_position_embeddings" in rope
    max_position = int(ORIGINAL * rope["factor"]) if given else ORIGINAL
    return checkpoints(rope=tuple(rope.items()), max_position=max_position, **model)


def random_ids(length: int) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(97) for _ in range(length)]


def assert_like_transformers(path: Path, lengths: list[int], steps: list[Step], tp: int) -> None:
    sequences = [random_ids(n) for n in lengths]
    for ids, logits in zip(sequences, logits_of(path, sequences, steps, tp=tp), strict=True):
        expected = reference_logits(path, ids)
        assert (logits - expected).abs().max() < TOLERANCE
        assert expected.std() > 0.3


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("scaling", ["linear", "yarn", "yarn-ramp"])
@pytest.mark.parametrize("model", MODELS)
def test_logits_on_both_sides_of_the_original_length(
    checkpoints: Checkpoints, model: str, scaling: str, tp: int
) -> None:
    """150 tokens in one step, and 100 in chunks that decode at the end."""
    path = scaled(checkpoints, scaling, **MODELS[model])
    chunks: list[Step] = [{0: 150, 1: 40}, {1: 50}, *[{1: 1}] * 10]
    assert_like_transformers(path, [150, 100], chunks, tp)
    plain = checkpoints(max_position=256, **MODELS[model])
    ids = random_ids(150)
    changed = (reference_logits(path, ids) - reference_logits(plain, ids)).abs().amax(-1)
    assert changed[-1] > 100 * TOLERANCE, "or a scaling that is ignored would pass"


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("model", MODELS)
def test_dynamic_within_the_trained_length(checkpoints: Checkpoints, model: str, tp: int) -> None:
    path = scaled(checkpoints, "dynamic", **MODELS[model])
    chunks: list[Step] = [{0: ORIGINAL, 1: 40}, {1: 20}, *[{1: 1}] * 4]
    assert_like_transformers(path, [ORIGINAL, ORIGINAL], chunks, tp)


@pytest.mark.parametrize("model", MODELS)
def test_dynamic_past_the_trained_length(checkpoints: Checkpoints, model: str) -> None:
    """Decoding on is transformers' own cached decoding, and a key does not depend on how its text
    was cut into steps."""
    path = scaled(checkpoints, "dynamic", **MODELS[model])
    ids = random_ids(150)
    expected = cached_logits(path, ids, ORIGINAL)
    decoded: list[Step] = [{0: ORIGINAL}, *[{0: 1}] * (150 - ORIGINAL)]
    for steps in (decoded, [{0: 150}], [{0: 70}, {0: 79}, {0: 1}]):
        [logits] = logits_of(path, [ids], steps)
        assert (logits - expected).abs().max() < TOLERANCE
    plain = checkpoints(max_position=256, **MODELS[model])
    assert (reference_logits(plain, ids) - expected).abs().amax(-1)[-1] > 100 * TOLERANCE


@torch.inference_mode()
def cached_logits(path: Path, ids: list[int], prompt: int) -> torch.Tensor:
    """transformers' logits [len(ids), V]: `prompt` tokens at once, then one by one on its cache."""
    import transformers

    # A model of its own: transformers keeps the frequencies of the longest text seen so far.
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    known = inspect.signature(type(model).forward).parameters
    name = "cache" if "cache" in known else "past_key_values"  # renamed in transformers 5
    cache, parts = {name: transformers.DynamicCache()}, []
    for part in ([*ids[:prompt]], *([token] for token in ids[prompt:])):
        output = model(torch.tensor([part]), **cache, use_cache=True)
        parts.append(output.logits[0])
    return torch.cat(parts)


@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("scaling", ["linear", "yarn"])
def test_engine_over_a_config_of_either_place(
    checkpoints: Checkpoints, tmp_path: Path, scaling: str, place: str
) -> None:
    """Greedy tokens of the whole engine, past the original length and from a warm prefix."""
    path = scaled(checkpoints, scaling)
    config = json.loads((path / "config.json").read_text())
    for name in ("rope_scaling", "rope_parameters", "rope_theta"):
        config.pop(name, None)
    theta = {"rope_theta": 10_000.0}
    config |= (
        {place: SCALINGS[scaling], **theta}
        if place == "rope_scaling"
        else {place: {**SCALINGS[scaling], **theta}}
    )
    shutil.copy(path / "model.safetensors", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    prompt = random_ids(ORIGINAL + 6)
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(tmp_path, device="cpu", enforce_eager=True, threads_per_rank=1) as llm:
        assert llm.effective["max_model_len"] == ORIGINAL * SCALINGS[scaling]["factor"]
        for _ in range(2):
            [output] = llm.generate([prompt], greedy)
            assert tuple(output.token_ids) == greedy_reference(path, tuple(prompt), 8)
