"""`python -m harness run` on two imaginary GPUs, as what a test's nsys starts; and that nsys.

The imaginary engine has graphs and the model of tests/support/fake_backend.py. Its steps and
collectives are known beforehand, and so is the export that an nsys would make of them.
"""

from __future__ import annotations

import json
import stat
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from engine.comm.types import Kind, Site
from harness.machine.capabilities import Machine
from harness.sweep.worker import Functions
from tests.support.fake_backend import SHAPE
from tests.support.fake_gpu_backend import FakeGpuBackend
from tests.support.nsys_export import Call, Export, session

GPUS = Machine(gpus=2, cores=2, cxx=None, packages={"triton": "3.6"})
BATCH, PROMPT, OUTPUT = 2, 4, 5
SETTINGS = ("tp=2", f"batch={BATCH}", "enforce_eager=false", "page_size=16", "workload=decode",
            f"workload.prompt_tokens={PROMPT}", f"workload.output_tokens={OUTPUT}",
            "measure.min_repeats=1", "measure.max_repeats=1", "device=cuda",
            "model.load_format=dummy", "engine.max_num_seqs=16",
            "engine.max_model_len=128")  # fmt: skip
FUNCTIONS = Functions(create="tests.support.nsys_target:create")

NSYS = """\
#!{python}
import os, shutil, subprocess, sys
with open({folder!r} + "/commands", "a") as file:
    print(*sys.argv[1:], sep="\\t", file=file)
out = next((a.split("=", 1)[1] for a in sys.argv if a.startswith("--output=")), None)
if sys.argv[1] == "--version":
    print("NVIDIA Nsight Systems version {version}-0v0")
elif sys.argv[1] == "profile":
    target = [a for a in sys.argv[2:]]
    while target[0].startswith("--"):
        target.pop(0)
    status = subprocess.call(target)
    open(out + ".nsys-rep", "w").close()
    sys.exit(status)
elif sys.argv[1] == "export":
    assert sys.argv[-1].endswith(".nsys-rep"), sys.argv
    shutil.copy({folder!r} + "/export.sqlite", out)
"""


class Engine(FakeGpuBackend):
    def __init__(self) -> None:  # the configuration comes with `start`
        self.points_served = 0

    def start(self, cfg: dict[str, Any], cache_dir: Any, since_s: float | None = None) -> None:
        FakeGpuBackend.__init__(self, cfg, "graph")
        self.effective |= {"comm": "nccl", "load_format": "dummy"}

    def drain_steps(self) -> list[np.ndarray]:
        """With the graph's rows as bucket, as the engine's own log has them."""
        logs = super().drain_steps()
        for log in logs:
            log["bucket"][log["replayed"]] *= 2
        return logs


def create(name: str = "native") -> Engine:
    return Engine()


def write_model(folder: Path) -> Path:
    """A directory whose config.json is of the imaginary engine's model."""
    folder.mkdir(parents=True)
    config = {
        "model_type": "qwen3", "vocab_size": SHAPE.vocab_size, "hidden_size": SHAPE.hidden_size,
        "num_hidden_layers": SHAPE.num_layers, "num_attention_heads": SHAPE.num_heads,
        "num_key_value_heads": SHAPE.num_kv_heads, "head_dim": SHAPE.head_dim,
        "intermediate_size": SHAPE.intermediate_size, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "max_position_embeddings": SHAPE.max_position, "tie_word_embeddings": True,
        "attention_bias": False, "eos_token_id": 63, "torch_dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def calls(rows: int) -> list[Call]:
    """Collectives of a step of so many rows, in float32; replays have twice the batch as rows."""
    size = {Kind.ALL_REDUCE: rows * SHAPE.hidden_size * 4}
    size[Kind.GATHER] = (BATCH if rows == BATCH * PROMPT else rows) * SHAPE.vocab_size * 4
    size[Kind.BROADCAST] = BATCH * 8
    model = [*SHAPE.expected_collectives(2, True), (Kind.BROADCAST, Site.TOKEN_IDS)]
    return [(kind.label, site.label, size[kind]) for kind, site in model]


def steps() -> list[tuple[str, int, list[Call]]]:
    """The window of the pass `nsys`: a prefill and four replays."""
    return [("prefill", BATCH, calls(BATCH * PROMPT))] + [
        ("replay", BATCH, calls(2 * BATCH)) for _ in range(OUTPUT - 1)
    ]


def kernel_ns(step: int, ordinal: int, rank: int) -> int:
    """Replays: 8 us, rank 0 waits 1 us more; the prefill: 9 us, rank 1 waits 70 us more."""
    return 9_000 + 70_000 * rank if step == 0 else 8_000 + 1_000 * (1 - rank)


def export() -> Export:
    return session(Export(), steps(), kernel_ns)


def write_nsys(folder: Path, *, version: str = "2025.3.2.474") -> Path:
    """An nsys that runs its target and exports `folder`/export.sqlite; it notes its arguments."""
    path = folder / "nsys"
    path.write_text(NSYS.format(python=sys.executable, folder=str(folder), version=version))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def main(arguments: list[str]) -> int:
    from harness.__main__ import conf_folder
    from harness.settings.launcher import run
    from harness.sweep import commands

    assert arguments[0] == "run"
    Machine.probe = classmethod(lambda cls: GPUS)  # type: ignore[method-assign, assignment]
    commands.ensure = lambda cfg: "there is no GPU"
    run_points = partial(commands.run_points, functions=FUNCTIONS)
    return run(arguments[1:], conf_folder(), run_points)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
