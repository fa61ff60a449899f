"""What an experiment's machine-dependent values become."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from harness.__main__ import conf_folder
from harness.settings import launcher, resolvers
from harness.settings.config import SettingsError, register


@pytest.mark.parametrize(
    ("gpus", "prompt", "batches", "tp"),
    [
        (0, 16, "1,4,16", "1,2"),
        (1, 128, "1,8,32", "1"),
        (2, 128, "1,8,32", "1,2"),
        (6, 128, "1,8,32", "1,2,4"),
        (16, 128, "1,8,32", "1,2,4,8"),
    ],
)
def test_values_follow_the_gpus(gpus: int, prompt: int, batches: str, tp: str) -> None:
    resolvers.register(gpus=gpus)
    cfg = OmegaConf.create(
        {
            "prompt": "${on_gpu:128,16}",
            "batch": '${on_gpu:"1,8,32","1,4,16"}',
            "tp": "${tp_sizes:}",
        }
    )
    assert OmegaConf.to_container(cfg, resolve=True) == {
        "prompt": prompt,
        "batch": batches,
        "tp": tp,
    }


@pytest.mark.parametrize(("tp", "comm"), [(1, "symm_mem"), (2, "nccl")])
def test_a_lever_of_several_ranks_is_none_of_one(tp: int, comm: str) -> None:
    resolvers.register(gpus=2)
    cfg = OmegaConf.create({"tp": tp, "comm": "${on_ranks:${tp},nccl,symm_mem}"})
    assert OmegaConf.to_container(cfg, resolve=True) == {"tp": tp, "comm": comm}


def composed(monkeypatch: pytest.MonkeyPatch, gpus: int, *words: str) -> set[tuple[int, int, int]]:
    """(tp, batch, prompt tokens) of tp_sweep's points, composed where `gpus` are visible."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    register()
    points = launcher.compose(["+experiment=tp_sweep", *words], conf_folder())
    return {(p["tp"], p["batch"], p["workload"]["prompt_tokens"]) for p in points}


LARGE, SMALL = (1, 8, 32, 128, 256), (1, 4, 16)
SLURM = ("device=cuda", "hydra/launcher=submitit_slurm")


@pytest.mark.parametrize(
    ("gpus", "words", "tps", "batches", "prompt"),
    [
        (0, (), (1, 2), SMALL, 16),
        (0, ("device=cuda", "tp=1,4"), (1, 4), LARGE, 128),
        (4, ("device=cpu",), (1, 2), SMALL, 16),
        (2, ("device=cuda",), (1, 2), LARGE, 128),
    ],
)
def test_an_experiment_has_the_sizes_of_the_device_that_is_named(
    gpus: int,
    words: tuple[str, ...],
    tps: tuple[int, ...],
    batches: tuple[int, ...],
    prompt: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = {(tp, batch, prompt) for tp in tps for batch in batches}
    assert composed(monkeypatch, gpus, *words) == wanted


@pytest.mark.parametrize("gpus", [0, 1])
@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("submitit", (*SLURM, "hydra.launcher.gpus_per_node=4")),
        ("ray", ("device=cuda", "hydra/launcher=ray", "+hydra.launcher.ray.remote.num_gpus=4")),
    ],
)
def test_jobs_have_the_gpus_that_the_launcher_asks_for(
    gpus: int, module: str, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(f"hydra_plugins.hydra_{module}_launcher")
    wanted = {(tp, batch, 128) for tp in (1, 2, 4) for batch in LARGE}
    assert composed(monkeypatch, gpus, *words) == wanted


def test_tp_sizes_that_nothing_says_are_refused_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(SettingsError, match=r"^device=cuda and no GPU here: .*give tp=.*per_node"):
        composed(monkeypatch, 0, "device=cuda")


def test_the_command_line_takes_the_place_of_the_experiments_axis(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    register()
    words = ["+experiment=tp_sweep", "device=cuda", "compile=off", "enforce_eager=true", "tp=4,2"]
    points = launcher.compose(words, conf_folder())
    assert [(p["tp"], p["batch"]) for p in points] == [(tp, b) for tp in (4, 2) for b in LARGE]


def test_two_devices_are_no_axis_of_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    words = ("device=cpu,cuda", "tp=1", "hydra/launcher=submitit_slurm")
    with pytest.raises(SettingsError, match="device as an axis with hydra/launcher=submitit_slurm"):
        composed(monkeypatch, 0, *words)
