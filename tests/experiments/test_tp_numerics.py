"""Tokens that differ at known places, live engines against transformers, and the trained model."""

from __future__ import annotations

import importlib.util
import math
import shutil
from concurrent.futures import Executor, Future
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd
import pytest
import torch

from experiments import greedy
from experiments.base import ExperimentError, report
from experiments.greedy import HELD_BACK, Answer, kept, of_transformers, prompts
from experiments.tp_numerics import COLUMNS, EXPERIMENT, difference, summary
from harness.machine import models
from harness.store import load
from tests.support.made_tables import write

TINY = {"name": "tiny", "path": None, "load_format": "auto"}


def answer(tokens: list[int], by: float = 0.0, lead: float = 1.0) -> Answer:
    return Answer(tokens, [-0.5 + by] * len(tokens), [lead] * len(tokens))


def test_a_difference_ends_at_the_first_token_that_differs() -> None:
    base = [answer([1, 2, 3, 4], lead=0.25), answer([5, 6, 7, 8], lead=9.0)]
    found = [Answer([1, 2, 9, 4], [-0.5, -0.4, -9.0, -9.0], [1.0] * 4), answer([5, 6, 7, 8], -0.2)]
    one = difference(found, base)
    assert (one.places, one.tokens) == ([2, 4], 4)
    assert one.dlogprob == pytest.approx(0.2) and one.tie == 0.25
    row = one.row()
    assert (row["identical"], row["diverged"], row["first"]) == (6 / 8, 1, 2)
    same = difference(base, base).row()
    assert (same["identical"], same["first"], same["tie"]) == (1.0, None, None)
    at_once = difference([answer([3])], [answer([4])])
    assert at_once.dlogprob is None and at_once.row()["identical"] == 0.0


def frame(*rows: tuple[str, float, int, float | None, float | None]) -> pd.DataFrame:
    names = ["against", "identical", "diverged", "dlogprob", "tie"]
    made = [dict.fromkeys(COLUMNS) | dict(zip(names, row, strict=True)) for row in rows]
    return pd.DataFrame(made, columns=list(COLUMNS))


@pytest.mark.parametrize(
    ("rows", "holds"),
    [
        ([("transformers", 1.0, 0, 1e-5, None)], None),
        ([("transformers", 0.9, 2, 0.1, 0.19), ("tp=1", 0.5, 9, 0.1, 5.0)], True),
        ([("transformers", 0.9, 2, 0.1, 0.21)], False),
        ([("transformers", 0.0, 2, None, 0.21)], None),
    ],
)
def test_the_claim_is_about_near_ties(
    rows: list[tuple[str, float, int, float | None, float | None]], holds: bool | None
) -> None:
    found = EXPERIMENT.verdict(frame(*rows))
    assert found.holds is holds
    assert ("no point differs" in found.text) is (rows[0][2] == 0)


def test_prompts_are_bytes_of_sources_that_were_kept_back() -> None:
    found = prompts(TINY, 16, 5)
    text = "\n".join(Path(importlib.util.find_spec(n).origin).read_text("utf-8")  # type: ignore
                     for n in HELD_BACK).encode()  # fmt: skip
    assert bytes(found[0]) == text[:16] and bytes(found[-1]) == text[-16:]
    assert [len(one) for one in found] == [16] * 5 and len({tuple(p) for p in found}) == 5
    with pytest.raises(ValueError, match="workload.prompt_tokens=10000000: the text has"):
        prompts(TINY, 10_000_000)


def test_the_reference_is_a_greedy_argmax_of_the_whole_sequence() -> None:
    """Without a cache, every position anew, in float64."""
    from transformers import AutoModelForCausalLM

    asked = prompts(TINY, 8, 2)
    found = of_transformers(TINY, asked, 3)
    model = AutoModelForCausalLM.from_pretrained(models.build_tiny(), dtype=torch.float64).eval()
    for prompt, one in zip(asked, found, strict=True):
        ids = list(prompt)
        for token, logprob, lead in zip(one.tokens, one.logprobs, one.lead, strict=True):
            with torch.inference_mode():
                last = model(input_ids=torch.tensor([ids])).logits[0, -1].log_softmax(-1)
            best = last.sort(descending=True).values
            assert token == int(last.argmax()) and logprob == pytest.approx(
                float(best[0]), abs=1e-5
            )
            assert lead == pytest.approx(float(best[0] - best[1]), abs=1e-5)
            ids.append(token)


class Here(Executor):
    """Runs what is submitted in this process."""

    def submit(self, make: Any, /, *args: Any, **kwargs: Any) -> Any:
        done: Future[Any] = Future()
        done.set_result(make(*args, **kwargs))
        return done


def test_live_engines_give_transformers_tokens_and_are_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    # A copy, which nothing tells from a user's own: the one that stands in the cache is refused.
    model = TINY | {"path": str(shutil.copytree(models.build_tiny(), tmp_path / "model"))}
    sizes: dict[str, Any] = {
        "model": model,
        "workload__prompt_tokens": 8, "workload__output_tokens": 4, "instrument": [],
        "device": "cpu", "engine__max_model_len": 64, "engine__threads_per_rank": 1,
    }  # fmt: skip
    spawned = [greedy.ProcessPoolExecutor]  # the first is; the others save the time of imports
    monkeypatch.setattr(
        greedy, "ProcessPoolExecutor", lambda *a, **k: spawned.pop()(*a, **k) if spawned else Here()
    )
    write(run, {}, mode="eager", tp=1, batch=4, **sizes)
    write(run, {}, mode="eager", tp=2, batch=8, index=1, **sizes)
    write(run, {}, index=2, tp=4, status="skipped", reason="needs 4 GPUs, 2 visible", **sizes)
    found = summary(load(run))
    assert found["against"].dropna().to_list() == [
        "transformers", "transformers", "tp=1 batch=4 eager"
    ]  # fmt: skip
    measured = found[found["against"].notna()]
    assert set(measured["identical"]) == {1.0} and set(measured["requests"]) == {32}
    assert measured["dlogprob"].between(0, 1e-4).all()
    assert found["reason"].dropna().to_list() == ["skipped: needs 4 GPUs, 2 visible"]
    assert not spawned
    monkeypatch.setattr(greedy, "ProcessPoolExecutor", None)  # nothing is run again
    text = report(EXPERIMENT, run, tmp_path / "out")
    assert "**The claim is undecided**: 100.00% of tokens come before a diff" in text
    assert "of 1 other ways of running the same engine 1 give the same tokens" in text
    assert (tmp_path / "out" / "tp_numerics.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("how", ["dummy", "name", "path", "linked"])
def test_random_weights_are_refused(how: str, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(models.build_tiny())
    model = TINY | {
        "dummy": {"load_format": "dummy"}, "name": {}, "path": {"path": str(models.build_tiny())},
        "linked": {"path": str(link)},
    }[how]  # fmt: skip
    write(tmp_path / "run", {}, model=model)
    with pytest.raises(ExperimentError, match=r"model.path=\$\(python scripts/train_tiny.py\)"):
        summary(load(tmp_path / "run"))


def test_a_run_without_a_point_says_so(tmp_path: Path) -> None:
    write(tmp_path / "none", {}, status="oom")
    with pytest.raises(ExperimentError, match="no point that ran"):
        summary(load(tmp_path / "none"))


def test_answers_survive_their_file_exactly(tmp_path: Path) -> None:
    made = Answer([1, 2], [-0.1, -1 / 3], [0.5, math.pi])
    (tmp_path / "a.json").write_text(
        '[{"tokens":[1,2],"logprobs":[-0.1,-0.3333333333333333],"lead":[0.5,3.141592653589793]}]'
    )
    assert kept(tmp_path / "a.json", of_transformers) == [made]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = Path(__file__).resolve().parents[2] / "scripts" / "train_tiny.py"
    spec = importlib.util.spec_from_file_location("train_tiny", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_training_learns_is_exact_by_seed_and_ends_in_hugging_face_format(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setenv("RANGEFINDER_CACHE", str(tmp_path))
    monkeypatch.setattr(script, "BATCH", 2)
    monkeypatch.setattr(script, "LENGTH", 32)
    losses: list[float] = []
    text = script.corpus(20_000)
    assert len(text) == 20_000 and b"import" in text
    one = script.train(text, 12, 0, lambda _, loss: losses.append(loss))
    assert abs(losses[0] - math.log(1024)) < 0.5, "no knowledge: every id of the vocabulary alike"
    assert losses[-1] < losses[0] - 1
    folder = script.build(12, 0, 20_000)
    saved = AutoModelForCausalLM.from_pretrained(folder)
    assert all(
        torch.equal(a, b) for a, b in zip(one.parameters(), saved.parameters(), strict=True)
    ), "the same seed gives the same weights"
    other = script.train(text, 12, 1)
    assert not torch.equal(other.lm_head.weight, one.lm_head.weight)
    assert AutoTokenizer.from_pretrained(folder)("é = 1")["input_ids"] == list("é = 1".encode())
    assert script.build(12, 0, 20_000) == folder and folder.name.startswith("trained-tiny-")
