"""Where a decode step's time goes, kernel by kernel; on GPUs.

    python scripts/step_kernels.py [--model qwen3-0.6b] [--batches 1,256] [SETTING=VALUE ...]

SETTINGs are the engine's (engine/config.py), such as tp=2 or fused=store. Dummy weights, prompts
of 128 tokens. Prints for each batch the kernels of rank 0's replayed decode steps by the time they
take, by torch.profiler (CUPTI).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engine import LLM, SamplingParams
from engine.comm.types import ObserverContext
from harness.machine.models import resolve_model
from harness.observers.profiler import MARK, Kernel, ProfilerObserver, cuda_profile
from harness.tables.console import markdown_table

PROMPT, OUTPUT = 128, 40


class Kept:
    """A profile that remembers its kernels."""

    def __init__(self) -> None:
        self._profile = cuda_profile()
        self.start, self.stop = self._profile.start, self._profile.stop
        self.found: list[Kernel] = []

    def kernels(self) -> list[Kernel]:
        self.found = self._profile.kernels()
        return self.found


class KernelObserver(ProfilerObserver):
    """ProfilerObserver whose result is every kernel."""

    def __init__(self, context: ObserverContext) -> None:
        super().__init__(context, Kept)

    def result(self) -> Any:
        kept = self._profile
        super().result()
        return [] if kept is None else sorted(kept.found, key=lambda kernel: kernel[1])


def steps_of(kernels: Sequence[Kernel]) -> list[list[Kernel]]:
    """The kernels between each step's two marks; the first step, which waited for the profiler,
    left out."""
    marks = [place for place, kernel in enumerate(kernels) if kernel[0].startswith(MARK)]
    pairs = list(zip(marks[::2], marks[1::2], strict=True))[1:]
    return [list(kernels[first + 1 : last]) for first, last in pairs]


def short(name: str) -> str:
    """A kernel's name without its template and arguments."""
    plain = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    return re.sub(r"<.*|\(.*", "", plain).split("::")[-1][:60]


def table(steps: Sequence[Sequence[Kernel]], rows: int = 16) -> str:
    """Markdown: the kernels of an average step by name, longest first; then all and the extent."""
    of: dict[str, list[int]] = defaultdict(list)
    for step in steps:
        for name, _, ns in step:
            of[short(name)].append(ns)
    extent = float(np.mean([max(b + ns for _, b, ns in s) - s[0][1] for s in steps])) / 1e3
    total = sum(sum(times) for times in of.values()) / len(steps) / 1e3
    lines = []
    for name, times in sorted(of.items(), key=lambda item: -sum(item[1]))[:rows]:
        each = sum(times) / len(steps) / 1e3
        count = len(times) / len(steps)
        lines.append(
            [name, f"{count:.4g}", f"{each / count:.2f}", f"{each:.1f}", f"{each / extent:.1%}"]
        )
    every = sum(map(len, steps)) / len(steps)
    lines.append(["all kernels", f"{every:.4g}", "", f"{total:.1f}", f"{total / extent:.1%}"])
    lines.append(["the step, first to last", "", "", f"{extent:.1f}", ""])
    return markdown_table(["kernel", "a step", "us each", "us a step", "share"], lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="A decode step's time by kernel.")
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--batches", default="1,256")
    parser.add_argument("settings", nargs="*")
    options = parser.parse_args()
    batches = [int(n) for n in options.batches.split(",")]
    settings = {}
    for name, value in (setting.split("=", 1) for setting in options.settings):
        settings[name] = (
            json.loads(value) if re.fullmatch(r"[\d.]+|true|false|null", value) else value
        )
    model = resolve_model({"name": options.model, "path": None, "load_format": "dummy"})
    sizes = {"max_model_len": 4096, "max_num_seqs": 256, "max_num_batched_tokens": 16384}
    with LLM(str(model), load_format="dummy", **(sizes | settings)) as llm:
        print(f"{options.model}, {llm.effective}\n")
        for batch in batches:
            prompts = [[(7 * i + n) % 9973 for n in range(PROMPT)] for i in range(batch)]
            params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
            llm.generate(prompts, params)
            llm.attach([KernelObserver])
            llm.generate(prompts, params)
            kernels = llm.detach()[0][0]
            print(f"batch {batch}\n\n{table(steps_of(kernels))}\n", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
