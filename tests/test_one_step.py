"""docs/one-step.md is run: every shape and number in it is what the engine's own code has there."""

from __future__ import annotations

import json
import queue
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import EngineConfig, ModelShape, SamplingParams
from engine.comm import Communicator
from engine.core import EngineCore
from engine.execution.runner import Runner
from engine.requests.request import Request
from engine.resolve import resolve
from engine.scheduling.step import StepPlan
from tests.support.threads import Recorder, run_ranks

DOCUMENT = Path(__file__).parents[1] / "docs" / "one-step.md"
BLOCK = re.compile(r"```text (prefill|decode)\n(.*?)```", re.DOTALL)
LINE = re.compile(r"(?P<name>[^:]+): (?P<shape>\[[^=]*\])( = (?P<values>\[.*\]))?")
CONFIG: dict[str, Any] = {
    "model_type": "qwen3", "vocab_size": 32, "hidden_size": 8, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2, "intermediate_size": 16,
    "rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "max_position_embeddings": 64,
    "tie_word_embeddings": False, "attention_bias": False, "torch_dtype": "float32",
}  # fmt: skip
PROMPTS = ([2, 19], [30, 4], [11])
Seen = dict[str, tuple[list[int], list[Any]]]  # name -> (shape, values)


def written() -> dict[str, Seen]:
    """What the document says, by step."""
    found: dict[str, Seen] = {"prefill": {}, "decode": {}}
    for step, block in BLOCK.findall(DOCUMENT.read_text(encoding="utf-8")):
        for line in block.splitlines():
            match = LINE.fullmatch(line.split("  #")[0].strip())
            assert match, line
            values = json.loads(match["values"]) if match["values"] else None
            assert match["name"] not in found[step], line
            found[step][match["name"]] = json.loads(match["shape"]), values  # type: ignore[assignment]
    return found


class Watch:
    """Keeps the tensors of one step on one rank, by the names that the document has for them."""

    def __init__(self, runner: Runner) -> None:
        self.seen: dict[str, Any] = {}
        self._runner = runner
        body, head = runner.model.model, runner.model.lm_head
        layer = body.layers[1]
        attention, mlp = layer.self_attn, layer.mlp
        self._result(body.embed_tokens, "partial", "embed_tokens.partial")
        self._result(body.embed_tokens, "forward", "embed_tokens")
        self._result(body.rotary, "forward", "rotary")
        self._result(attention.qkv_proj, "forward", "qkv_proj")
        self._result(attention, "qkv", ("q", "k", "v"))
        self._result(attention.attention, "forward", "attention")
        self._result(attention.o_proj, "partial", "o_proj.partial")
        self._result(layer, "forward", ("layer", "residual"))
        self._result(mlp.gate_up_proj, "forward", "gate_up_proj")
        self._result(mlp.act, "forward", "act")
        self._result(mlp.down_proj, "partial", "down_proj.partial")
        self._result(body.norm, "forward", ("norm", "_"))
        self._result(head, "partial", "lm_head.partial")
        self._result(head, "forward", "lm_head")
        self._result(runner._buffers, "fill", ("batch", "rows"))
        self._result(runner._sampling, "hand_out", "ids")

    def _result(self, owner: Any, method: str, names: str | tuple[str, ...]) -> None:
        plain = getattr(owner, method)

        def keeping(*args: Any) -> Any:
            result = plain(*args)
            parts = [result] if isinstance(names, str) else result
            for name, part in zip([names] if isinstance(names, str) else names, parts, strict=True):
                self.seen[name] = part.clone() if isinstance(part, torch.Tensor) else part
            return result

        setattr(owner, method, keeping)

    def named(self) -> dict[str, Any]:
        """Since the last call; what has the width of a kept buffer is cut to what counts."""
        seen, self.seen = self.seen, {}
        batch, seqs = seen.pop("batch"), int(seen["ids"].shape[0])
        seen.pop("rows"), seen.pop("_")
        seen["k_cache"] = self._runner.kv_cache.layers[1][0]
        for name in ("input_ids", "positions", "slot_mapping", "logits_indices"):
            seen[name] = getattr(batch, name).clone()  # the next step is laid out in the same place
        seen["cu_seqlens_q"] = batch.cu_seqlens_q[: seqs + 1].clone()
        seen["seq_lens"] = batch.seq_lens[:seqs].clone()
        seen["block_tables"] = batch.block_tables[:seqs, :1].clone()
        seen["owned rows"] = seen["embed_tokens.partial"].any(dim=1).nonzero().flatten()
        return seen


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """Each rank's prefill and decode step of three requests, by the engine's own scheduler, core
    and runners; two ranks in threads."""
    path = tmp_path_factory.mktemp("teaching")
    (path / "config.json").write_text(json.dumps(CONFIG))
    shape = ModelShape.from_hf(path)
    config = EngineConfig(
        model=str(path), tp=2, load_format="dummy", device="cpu", enforce_eager=True, page_size=4,
        num_pages=8, max_num_seqs=4, max_model_len=16, threads_per_rank=1,
    )  # fmt: skip
    plans: queue.Queue[bytes] = queue.Queue()
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

    def on_rank(comm: Communicator) -> list[dict[str, Any]]:
        runner, recorder = Runner(resolve(config, shape), shape, comm), Recorder()
        watch = Watch(runner)
        comm.attach([recorder])
        requests = [Request(str(i), list(p), params, 0, 0.0) for i, p in enumerate(PROMPTS)]
        core = (
            EngineCore(runner, lambda plan: plans.put(plan.to_bytes())) if not comm.rank else None
        )
        for request in requests if core is not None else ():
            core.add(request)
        found = []
        for _ in range(2):
            if core is not None:
                schedule, plan = core.plan()
                assert plan is not None
                core.collect(schedule, core.launch(schedule, plan))
            else:
                plan = StepPlan.from_bytes(plans.get())
                runner.launch(plan)
            seen = watch.named()
            for name in ("slots", "starts", "query_lens", "samples", "token_ids", "pages"):
                seen[f"plan.{name}"] = torch.from_numpy(getattr(plan, name).copy())
            if core is not None:
                newest = [[r.output_ids[-1]] for r in requests]
                assert seen["ids"].tolist() == [token for [token] in newest]
                seen["output_ids"] = torch.tensor([r.output_ids for r in requests])
            seen["bytes"] = torch.tensor([c.bytes for c in recorder.collectives])
            seen["collectives"] = [f"{c.kind.label} {c.site.label}" for c in recorder.collectives]
            recorder.collectives.clear()
            found.append(seen)
        return found

    return run_ranks(2, on_rank)


@pytest.mark.parametrize("step", ["prefill", "decode"])
def test_every_shape_and_number_is_that_of_a_run(
    steps: list[list[dict[str, Any]]], step: str
) -> None:
    index = ["prefill", "decode"].index(step)
    ranks = [rank[index] for rank in steps]
    said = written()[step]
    for name, (shape, values) in said.items():
        of_rank = re.fullmatch(r"(.+) on rank (\d)", name)
        bare, which = (of_rank[1], [int(of_rank[2])]) if of_rank else (name, [0, 1])
        for rank in which:
            found = ranks[rank][bare]
            if isinstance(found, list):
                assert ([len(found)], found) == (shape, values), (name, rank)
                continue
            assert list(found.shape) == shape, (name, rank)
            assert values is None or found.tolist() == values, (name, rank)
    # Nothing that was watched is left out.
    assert {re.sub(r" on rank \d", "", name) for name in said} == ranks[0].keys()
    assert ranks[1]["lm_head"] is None and "output_ids" not in ranks[1]
