"""Greedy tokens with log-probabilities, of an engine or of transformers, kept as JSON."""

from __future__ import annotations

import json
import multiprocessing
import sysconfig
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.machine.models import resolve_model

HELD_BACK = ("argparse", "heapq", "statistics", "textwrap")
"""Modules of Python's standard library whose text is prompts; scripts/train_tiny.py leaves them out
of what it trains on."""
REQUESTS = 32
Answers = list["Answer"]


@dataclass(frozen=True, slots=True)
class Answer:
    """What greedy decoding made of one prompt.

    Attributes:
        tokens: [N]; logprobs: [N] of each.
        lead: [N] by how much its log-probability is above that of the second best.
    """

    tokens: list[int]
    logprobs: list[float]
    lead: list[float]


def prompts(model: dict[str, Any], tokens: int, requests: int = REQUESTS) -> list[list[int]]:
    """`requests` stretches of `tokens` tokens of HELD_BACK, spread evenly over their text, by the
    model's own tokenizer.

    Raises:
        ValueError: the text is shorter than one.
    """
    from transformers import AutoTokenizer

    folder = Path(sysconfig.get_path("stdlib"))
    text = "\n".join((folder / f"{name}.py").read_text(encoding="utf-8") for name in HELD_BACK)
    ids = AutoTokenizer.from_pretrained(resolve_model(model))(text, verbose=False)["input_ids"]
    last = len(ids) - tokens
    if last < 0:
        raise ValueError(f"workload.prompt_tokens={tokens}: the text has {len(ids)}")
    places = [last * place // max(1, requests - 1) for place in range(requests)]
    return [ids[at : at + tokens] for at in places]


def of_engine(cfg: dict[str, Any], asked: Sequence[Sequence[int]], tokens: int) -> Answers:
    """A fresh engine of a point's configuration serves the prompts, at most `batch` at once."""
    from engine.requests.sampling_params import SamplingParams
    from harness.backends import create

    cfg = {**cfg, "engine": {**cfg["engine"], "max_num_seqs": cfg["batch"]}}
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, logprobs=2)
    backend = create(cfg.get("backend", "native"))  # older runs have no such setting
    backend.start(cfg, None)
    try:
        outputs = backend.generate(asked, [params] * len(asked))
    finally:
        backend.close()
    found = []
    for output in outputs:
        if output.error is not None:
            raise RuntimeError(f"{output.request_id}: {output.error}")
        places = output.logprobs or ()
        found.append(
            Answer(
                list(output.token_ids),
                [place.logprob for place in places],
                [place.top[0][1] - place.top[1][1] for place in places],
            )
        )
    return found


def of_transformers(model: dict[str, Any], asked: Sequence[Sequence[int]], tokens: int) -> Answers:
    """transformers in float32, one prompt after the other, on a GPU where there is one."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    device = "cuda" if torch.cuda.is_available() else "cpu"
    reference = AutoModelForCausalLM.from_pretrained(resolve_model(model), dtype=torch.float32)
    reference.to(device).eval()
    # In the place of the checkpoint's own, which may ask for sampling, penalties or an end.
    reference.generation_config = GenerationConfig(
        do_sample=False, max_new_tokens=tokens, eos_token_id=None, pad_token_id=0,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    found = []
    for prompt in asked:
        ids = torch.tensor([list(prompt)], device=device)
        made = reference.generate(ids, attention_mask=torch.ones_like(ids))
        logprobs = torch.cat(made.logits).log_softmax(-1)  # [N, V]
        chosen = made.sequences[0, len(prompt) :]
        best = logprobs.topk(2).values
        found.append(
            Answer(
                chosen.tolist(),
                logprobs.gather(1, chosen[:, None])[:, 0].tolist(),
                (best[:, 0] - best[:, 1]).tolist(),
            )
        )
    return found


def kept(path: Path, make: Callable[..., Answers], *args: Any) -> Answers:
    """The answers that stand in `path`; where none do, `make(*args)` in a process of its own, which
    leaves nothing on a GPU behind."""
    if not path.is_file():
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=spawn) as pool:
            answers = pool.submit(make, *args).result()
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        text = json.dumps([asdict(answer) for answer in answers], allow_nan=False)
        partial.write_text(text, encoding="utf-8")
        partial.rename(path)
    return [Answer(**answer) for answer in json.loads(path.read_text(encoding="utf-8"))]
