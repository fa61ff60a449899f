"""Linked axes: prompt and output lengths as one, and counts that follow from a point"""

from __future__ import annotations

from typing import Any

import pytest

from harness.__main__ import conf_folder
from harness.settings.config import SettingsError, register
from harness.settings.launcher import compose
from harness.settings.naming import named, settings, varying
from tests.support.plans import plan


@pytest.fixture(autouse=True)
def _schema() -> None:
    register()


def composed(*words: str) -> list[dict[str, Any]]:
    return compose(words, conf_folder())


def lengths(cfg: dict[str, Any]) -> tuple[int, int]:
    return cfg["workload"]["prompt_tokens"], cfg["workload"]["output_tokens"]


def test_pairs_are_swept_together_and_with_other_axes() -> None:
    cfgs = composed("+experiment=tp_sweep", "workload.shape=128/64,20/4", "batch=1,8", "tp=1",
                    "compile=off", "enforce_eager=true")  # fmt: skip
    assert [(c["batch"], *lengths(c)) for c in cfgs] == [
        (1, 128, 64), (1, 20, 4), (8, 128, 64), (8, 20, 4),
    ]  # fmt: skip


def test_a_point_is_the_same_one_however_its_lengths_are_written() -> None:
    pair = composed("workload.shape=12/34", "model=tiny")
    apart = composed("workload.prompt_tokens=12", "workload.output_tokens=34", "model=tiny")
    assert pair == apart
    assert plan(pair).key == plan(apart).key


def test_points_are_named_by_both_lengths() -> None:
    asked = [settings(cfg) for cfg in composed("workload.shape=12/34,5/6", "workload=prefill")]
    names = varying(asked)
    assert [named(one, names) for one in asked] == [
        "workload.prompt_tokens=12 workload.output_tokens=34",
        "workload.prompt_tokens=5 workload.output_tokens=6",
    ]


@pytest.mark.parametrize("shape", ["128", "128/0", "a/b", "1/2/3", "-1/4", "1.5/2"])
def test_what_is_no_pair_is_refused(shape: str) -> None:
    with pytest.raises(SettingsError, match=f"workload.shape={shape}: give tokens of the prompt"):
        composed(f"workload.shape={shape}")


def test_a_workload_with_lengths_of_its_own_takes_no_pair() -> None:
    with pytest.raises(SettingsError, match="the requests of nano_vllm have lengths of their own"):
        composed("workload=nano_vllm", "workload.shape=1/2")


def test_a_length_given_twice_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"workload.shape and workload.output_tokens: shape se"):
        composed("workload.shape=1/2,3/4", "workload.output_tokens=7")


def test_a_number_of_requests_follows_from_the_batch_of_each_point() -> None:
    words = ("workload=nano_vllm", "batch=2,8", 'workload.num_requests="${times:4,${batch}}"')
    assert [(c["batch"], c["workload"]["num_requests"]) for c in composed(*words)] == [
        (2, 8), (8, 32),
    ]  # fmt: skip
