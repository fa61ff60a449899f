"""The model against transformers' own, in float32 on a CPU: every position's logits within 1e-4."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.comm import Communicator, Kind, Phase, Site, SoloCommunicator, StepInfo
from engine.kv_cache import KVCache
from tests.support.batches import PagedSequences, Rows, build_batch
from tests.support.checkpoints import Checkpoints, reference_logits
from tests.support.models import build_model, chunked, logits_of, staggered, whole
from tests.support.threads import Meeting, Recorder, ThreadCommunicator, run_ranks

LENGTHS = (11, 1, 18, 7)
TOLERANCE = 1e-4


def random_ids(vocab_size: int) -> list[list[int]]:
    rng = random.Random(1)
    sequences = [[rng.randrange(vocab_size) for _ in range(n)] for n in LENGTHS]
    sequences[0][:2] = [0, vocab_size - 1]  # both ends of the vocabulary
    return sequences


def assert_like_transformers(path: Path, sequences: list[list[int]], **how: Any) -> None:
    schedule = how.pop("schedule", whole)
    ours = logits_of(path, sequences, schedule(LENGTHS), **how)
    for ids, logits in zip(sequences, ours, strict=True):
        expected = reference_logits(path, ids)
        assert logits.shape == expected.shape
        assert (logits - expected).abs().max() < TOLERANCE
        assert expected.std() > 0.3, "logits too small for the tolerance to mean anything"


VARIANTS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tied": True},
    "bias": {"attention_bias": True},
    "tied-bias": {"tied": True, "attention_bias": True},
    "heads-4-4": {"num_kv_heads": 4},
    "heads-4-1": {"num_kv_heads": 1, "attention_bias": True},
    "heads-8-2": {"num_heads": 8, "head_dim": 8},
    "qwen2": {"model_type": "qwen2", "hidden_size": 32, "head_dim": 8},
    "qwen2-tied-4-1": {"model_type": "qwen2", "hidden_size": 64, "tied": True, "num_kv_heads": 1},
    "theta-5e6": {"rope_theta": 5e6},
}


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("variant", VARIANTS)
def test_prefill_matches(checkpoints: Checkpoints, variant: str, tp: int) -> None:
    path = checkpoints(**VARIANTS[variant])  # vocabulary 97: not divisible by 2 or 4
    assert_like_transformers(path, random_ids(97), tp=tp)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("schedule", [chunked(1), chunked(3), chunked(4), chunked(8), staggered])
def test_chunked_prefill_and_decode_match(
    checkpoints: Checkpoints, schedule: Any, page_size: int
) -> None:
    path = checkpoints(tied=True)
    assert_like_transformers(path, random_ids(97), schedule=schedule, page_size=page_size)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("variant", ["bias", "heads-4-1", "qwen2"])
def test_mixed_steps_match_over_ranks(checkpoints: Checkpoints, variant: str, tp: int) -> None:
    path = checkpoints(**VARIANTS[variant])
    assert_like_transformers(path, random_ids(97), schedule=staggered, tp=tp)


def test_a_window_that_is_not_used_changes_nothing(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """As every published Qwen2.5 has one: a sliding_window beside use_sliding_window=false."""
    path = tmp_path / "copy"
    shutil.copytree(checkpoints(**VARIANTS["qwen2"]), path)
    config = json.loads((path / "config.json").read_text())
    config |= {"use_sliding_window": False, "sliding_window": 4, "max_window_layers": 1}
    (path / "config.json").write_text(json.dumps(config))
    assert_like_transformers(path, random_ids(97), schedule=staggered)


@pytest.mark.parametrize("page_size", [4, 16])
def test_prompts_round_a_page_boundary_match(checkpoints: Checkpoints, page_size: int) -> None:
    path = checkpoints(attention_bias=True)
    rng = random.Random(2)
    lengths = [page_size - 1, page_size, page_size + 1, 2 * page_size]
    sequences = [[rng.randrange(97) for _ in range(n)] for n in lengths]
    ours = logits_of(path, sequences, whole(lengths), page_size=page_size)
    for ids, logits in zip(sequences, ours, strict=True):
        assert (logits - reference_logits(path, ids)).abs().max() < TOLERANCE


def test_chunk_ends_at_every_position(checkpoints: Checkpoints) -> None:
    """Of 70 tokens, and chunks of 32 after the first."""
    path = checkpoints()
    rng = random.Random(3)
    ids = [rng.randrange(97) for _ in range(70)]
    expected = reference_logits(path, ids)
    for cut in range(1, len(ids)):
        rest = [min(32, len(ids) - begin) for begin in range(cut, len(ids), 32)]
        [logits] = logits_of(path, [ids], [{0: count} for count in (cut, *rest)])
        assert (logits - expected).abs().max() < TOLERANCE, cut


@pytest.mark.parametrize("size", [2_000, 512, 300, 257, 256])
def test_a_long_prompt_in_chunks_of_any_size(checkpoints: Checkpoints, size: int) -> None:
    """Pages of 256: a chunk ends with a page, behind it, or anywhere; each attends up to its own
    end and no further."""
    path = checkpoints(max_position=2_048, num_layers=2)
    rng = random.Random(4)
    ids = [rng.randrange(97) for _ in range(2_000)]
    [logits] = logits_of(path, [ids], chunked(size)([2_000]), page_size=256)
    assert (logits - reference_logits(path, ids)).abs().max() < TOLERANCE


def test_padding_rows_change_nothing(checkpoints: Checkpoints) -> None:
    path = checkpoints()
    assert_like_transformers(path, random_ids(97), schedule=staggered, padding=3)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_gathered_logits_of_several_rows_are_not_interleaved(
    checkpoints: Checkpoints, rows: int
) -> None:
    path = checkpoints()
    sequences = random_ids(97)[:rows]
    steps = whole([len(s) for s in sequences])
    for alone, shared in zip(
        logits_of(path, sequences, steps), logits_of(path, sequences, steps, tp=2), strict=True
    ):
        torch.testing.assert_close(shared, alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.1), ("float16", 0.02)])
def test_half_precision_stays_near(checkpoints: Checkpoints, dtype: str, tolerance: float) -> None:
    """The checkpoint is in that dtype: the reference reads the same rounded weights in float32."""
    path = checkpoints(dtype=dtype)
    ids = random_ids(97)[2]
    expected = reference_logits(path, ids)
    [logits] = logits_of(path, [ids], [{0: 10}, {0: 8}], dtype=getattr(torch, dtype))
    assert logits.dtype == getattr(torch, dtype)
    assert (logits.float() - expected).abs().max() < tolerance * expected.abs().max()


# -- collectives ----------------------------------------------------------------------------------


def prompt(tokens: int, start: int = 0, samples: bool = True) -> Rows:
    return Rows(list(range(tokens)), start, [0, 1, 2], samples)


def run_one(path: Path, rows: list[Rows], tp: int) -> list[Recorder]:
    def on_rank(comm: Communicator) -> Recorder:
        model, shape = build_model(path, comm)
        cache = KVCache(shape, comm.world, 4, 4, torch.float32, "cpu")
        recorder = Recorder()
        comm.attach([recorder])
        comm.step_begin(StepInfo(5, Phase.PREFILL, 1, 4, 4, 1, "eager"))
        batch = build_batch(rows, 4)
        model.compute_logits(model(batch, cache), batch)
        return recorder

    return run_ranks(tp, on_rank)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("samples", [True, False])
def test_collectives_of_a_step(checkpoints: Checkpoints, tp: int, samples: bool) -> None:
    """2L+1 all-reduces of T*H values in program order, one gather of N*V (padded) if N > 0."""
    path = checkpoints()
    tokens, hidden, layers, vocab, itemsize = 7, 24, 3, 97, 4
    recorders = run_one(path, [prompt(tokens, samples=samples)], tp)
    _, shape = build_model(path, SoloCommunicator())
    for rank, recorder in enumerate(recorders):
        heard = recorder.collectives
        sites = [Site.EMBED, *[Site.ATTN_O_PROJ, Site.MLP_DOWN_PROJ] * layers]
        expected = [(Kind.ALL_REDUCE, site, tokens * hidden * itemsize) for site in sites]
        if samples:
            padded = -(-vocab // tp) * tp
            expected.append((Kind.GATHER, Site.LM_HEAD, padded * itemsize))
        assert [(c.kind, c.site, c.bytes) for c in heard] == expected
        assert [(c.kind, c.site) for c in heard] == list(shape.expected_collectives(tp, samples))
        assert [c.ordinal for c in heard] == list(range(len(heard)))
        assert {(c.step, c.world, c.rank, c.dtype) for c in heard} == {(5, tp, rank, "float32")}


def test_no_collective_on_one_rank(checkpoints: Checkpoints) -> None:
    [recorder] = run_one(checkpoints(), [prompt(7)], 1)
    assert recorder.collectives == []


def test_only_rows_that_sample_are_projected(checkpoints: Checkpoints) -> None:
    path = checkpoints()
    model, shape = build_model(path, SoloCommunicator())
    cache = KVCache(shape, 1, 8, 4, torch.float32, "cpu")
    first, second = [5, 6, 7, 8, 9], [11, 12, 13]
    batch = build_batch([Rows(first, 0, [3, 1], samples=False), Rows(second, 0, [6])], 4)
    with torch.inference_mode():
        hidden = model(batch, cache)
        logits = model.compute_logits(hidden, batch)
    assert hidden.shape == (8, 24)
    assert logits is not None
    expected = reference_logits(path, second)[-1:]
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


# -- compiled -------------------------------------------------------------------------------------


def test_whole_model_compiles_into_two_graphs_that_copy_no_cache(checkpoints: Checkpoints) -> None:
    """One graph for any T >= 2 and one for T = 1, none broken; results as in eager mode, and every
    collective of a world of one heard at every compiled call.

    Compile caches are off: their keys do not say whether K and V share a storage, which is what
    decides whether the code copies them.
    """
    import torch._inductor.config as inductor_config
    from torch._dynamo.utils import counters
    from torch._inductor.utils import run_and_get_code

    path = checkpoints(num_layers=2, tied=True, attention_bias=True)
    ids = [random_ids(97)[2], random_ids(97)[0]]
    comm, recorder = ThreadCommunicator(0, 1, Meeting(1)), Recorder()
    model, shape = build_model(path, comm)

    def new_sequences() -> PagedSequences:
        return PagedSequences(model, KVCache(shape, 1, 16, 4, torch.float32, "cpu"), ids)

    torch._dynamo.reset()
    counters.clear()
    eager, compiled = new_sequences(), new_sequences()
    steps = [{0: 4}, {0: 1}, {0: 2, 1: 5}, {0: 1, 1: 1}, {0: 8}, {0: 1}, {0: 1, 1: 5}]
    with torch.inference_mode():
        for step in steps:
            eager.step(step)
        body = torch.compile(model.model, fullgraph=True)

        def marked(batch: Any, cache: KVCache) -> torch.Tensor:
            if batch.input_ids.shape[0] > 1:
                for tensor in (batch.input_ids, batch.positions, batch.slot_mapping):
                    torch._dynamo.mark_dynamic(tensor, 0)
            return body(batch, cache)

        def first_steps() -> None:
            for step in steps[:2]:
                compiled.step(step)

        model.forward = marked  # type: ignore[method-assign,assignment]
        with inductor_config.patch(force_disable_caches=True):
            _, codes = run_and_get_code(first_steps)
        comm.attach([recorder])
        with torch._dynamo.config.patch(error_on_recompile=True):
            for step in steps[2:]:
                compiled.step(step)
    comm.close()
    torch._dynamo.reset()  # compiled code hangs on the model's classes, which later tests use
    assert counters["stats"]["unique_graphs"] == len(codes) == 2
    assert not counters["graph_break"]
    layer = [Site.ATTN_O_PROJ, Site.MLP_DOWN_PROJ]
    of_a_step = [Site.EMBED, *layer * shape.num_layers, Site.LM_HEAD]
    assert [c.site for c in recorder.collectives] == of_a_step * len(steps[2:])
    for i in range(2):
        torch.testing.assert_close(compiled.result(i), eager.result(i), atol=1e-5, rtol=0)
    for code in codes:
        calls = re.findall(r"rangefinder\.paged_attention\.default\((.*)\)", code)
        assert len(calls) == shape.num_layers
        for call in calls:
            # The 4th and 5th argument are the caches: the graph's own inputs, not copies of them.
            assert re.search(r"\), arg\d+_1, arg\d+_1, arg\d+_1", call), call
