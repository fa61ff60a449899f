"""Trains a small Qwen3 on Python's own standard library, and prints the folder that it stands in.

    python scripts/train_tiny.py [--steps 400] [--seed 0]

Weights that were never trained have flat distributions, in which the best token is decided by the
last bit: whether a change of TP size, batch or mode moves tokens can only be asked of weights with
peaks. The text is what every machine has: the modules of the standard library, but for those of
experiments/greedy.py, which are kept back as prompts. Tokens are bytes. The result depends on
--steps, --seed, the text (hence Python's version) and torch's kernels, and is built once a recipe,
below the cache folder (harness/machine/models.py), in Hugging Face format. 400 steps take some
minutes on two cores.

    python -m harness +experiment=tp_numerics model.path=$(python scripts/train_tiny.py)
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import sys
import sysconfig
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from experiments.greedy import HELD_BACK  # noqa: E402
from harness.machine import models  # noqa: E402
from harness.machine.cache import CacheError  # noqa: E402

VERSION = 1  # of the recipe
# Heads as wide as those of every published Qwen3: what is asked of it is then asked of the same
# attention kernels, of which some builds have no others.
SHAPE = {**models.TINY, "head_dim": 128}
BATCH, LENGTH = 16, 256  # sequences of a step, bytes of one
RATE, WARMUP = 3e-3, 20  # AdamW's peak rate, and steps until it; then half a cosine to 0


def corpus(limit: int | None = None) -> bytes:
    """The modules of the standard library by name, at most `limit` bytes."""
    found, size = [], 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if path.stem not in HELD_BACK:
            found.append(path.read_bytes())
            size += len(found[-1])
        if limit is not None and size >= limit:
            break
    return b"\n".join(found)[:limit]


def train(text: bytes, steps: int, seed: int, report: Any = None) -> Any:
    """A Qwen3 of SHAPE after `steps` of AdamW on random places of `text`; `report` is
    called with (step, loss)."""
    import torch
    from torch.nn.functional import cross_entropy
    from transformers import Qwen3Config, Qwen3ForCausalLM

    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(Qwen3Config(**SHAPE)).to(torch.float32).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
        for step in range(steps):
            rate = min((step + 1) / WARMUP, (1 + math.cos(math.pi * step / steps)) / 2)
            optimizer.param_groups[0]["lr"] = RATE * rate
            places = torch.randint(len(data) - LENGTH - 1, (BATCH,)).tolist()
            rows = torch.stack([data[at : at + LENGTH + 1] for at in places]).long()
            logits = model(input_ids=rows[:, :-1], use_cache=False).logits
            loss = cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if report is not None:
                report(step, loss.item())
    return model.eval()


def build(steps: int, seed: int, limit: int | None = None) -> Path:
    """The folder of the trained model, built if it is not there."""
    text = corpus(limit)
    recipe = json.dumps(
        [VERSION, SHAPE, steps, seed, BATCH, LENGTH, RATE, WARMUP,
         hashlib.sha256(text).hexdigest(), platform.python_version()],
        sort_keys=True,
    )  # fmt: skip

    def write(folder: Path) -> None:
        def report(step: int, loss: float) -> None:
            if step % 20 == 0 or step == steps - 1:
                print(f"step {step + 1} of {steps}: {loss:.2f} nats a byte", file=sys.stderr)

        train(text, steps, seed, report).save_pretrained(folder)
        models.save_byte_tokenizer(folder)

    return models.built("trained-tiny", recipe, write)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Trains a small Qwen3 on Python's sources.")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    if options.steps < 1:
        parser.error(f"--steps={options.steps}: give at least 1")
    try:
        print(build(options.steps, options.seed))
    except CacheError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
