"""Hydra's end of the harness: a command line -> the configurations of all its points.

Hydra's sweeper takes the jobs of a sweep one by one in the order of the axes; here the whole list
must be known before the first one starts. So Hydra parses and composes, and nothing else of its run
machinery (job folders, callbacks, logging) is used, unless a launcher is asked for: that one gets a
job for each engine (harness/fanout/).
"""

from __future__ import annotations

import argparse
import copy
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.callbacks import Callbacks
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import OverrideType
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, OverrideParseException
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from harness.settings import config, resolvers
from harness.settings.axes import axes, refuse_device_axis, refuse_empty
from harness.settings.config import LENGTHS, SHAPE, SettingsError
from harness.settings.experiment_file import UNREADABLE, experiment_file, is_at_fault, remark
from harness.settings.presets import Presets
from harness.settings.usage import USAGE
from harness.settings.words import IsGroup, WordError, check, groups, quoted

Handler = Callable[[list[dict[str, Any]]], int]
"""All configurations as plain dicts, in the order of the axes -> exit status."""
FanOut = Callable[[list[dict[str, Any]], str, Any], int]
"""The same and a launcher's name and `submit` (harness/fanout/command.py) -> exit status."""
INFORMATION = ("--hydra-help", "--cfg", "-c", "--info", "-i", "--shell-completion", "-sc",
               "--version")  # fmt: skip
"""Flags with which Hydra prints something and runs nothing; it answers them itself."""
CONFIGURATION = ("--cfg", "-c", "--info", "-i")
"""Those of them that print settings."""

QUOTING = """a value with a comma, a space, = or a bracket is quoted: 'workload.trace="a,b.csv"'"""

CLUSTER = """hydra/launcher=submitit_slurm, submitit_local and ray come with pip install \
'rangefinder[cluster]'"""


def run(
    arguments: Sequence[str],
    conf: Path,
    handler: Handler,
    fan_out: FanOut | None = None,
    verb: str = "run",
) -> int:
    """Composes the command line over the folder `conf` and calls `handler` once; where it names a
    launcher, `fan_out` in its place. A flag that is none is answered with the usage of `verb`.

    Returns the handler's status, 1 where a setting is wrong, 2 where a flag is.
    """
    config.register()
    asked = {argument.split("=")[0] for argument in arguments}
    informed = not asked.isdisjoint(INFORMATION)
    parser = argparse.ArgumentParser(
        f"python -m harness {verb}", USAGE[verb].partition("\n\n")[0], add_help=False,
        allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("--config-dir", "-cd", type=Path)
    parser.add_argument("--multirun", "-m", action="store_true")  # every command line may sweep
    parser.add_argument("overrides", nargs="*")
    try:
        reader = get_args_parser() if informed else parser
        options = reader.parse_intermixed_args(list(arguments))
    except SystemExit as ended:
        return 2 if ended.code else 0  # 0: it has printed a version
    config_dir = None if options.config_dir is None else Path(options.config_dir)
    try:
        if informed:
            words = list(arguments)
            if options.overrides and not asked.isdisjoint(CONFIGURATION):
                # Beside the others: Hydra takes its words in one row.
                place = words.index(options.overrides[0])
                words[place:place] = _preset(options.overrides, conf, config_dir)
            return _let_hydra_answer(words, conf)
        configs, launcher = _compose(options.overrides, conf, config_dir)
        if launcher == "basic":
            return handler(configs)
        if fan_out is None:
            raise SettingsError(f"hydra/launcher={launcher}: only a run has jobs; leave it out")
        submit = partial(_submit, options.overrides, conf, config_dir)
        return fan_out(configs, launcher, submit)
    except (SettingsError, HydraException, OmegaConfBaseException, *UNREADABLE) as error:
        print(f"error: {error}", file=sys.stderr)
        if isinstance(error.__cause__, OmegaConfBaseException):
            print(error.__cause__, file=sys.stderr)
        if isinstance(error, OverrideParseException):
            print(QUOTING, file=sys.stderr)
        if "'hydra/launcher/" in str(error):
            print(CLUSTER, file=sys.stderr)
        file = experiment_file(options.overrides, conf, config_dir)
        if file is not None and is_at_fault(error, file, options.overrides):
            print(remark(file), file=sys.stderr)
        return 1


def compose(
    overrides: Sequence[str], conf: Path, config_dir: Path | None = None
) -> list[dict[str, Any]]:
    """Every combination of the swept values; `hydra.sweeper.params` of the experiment first, then
    the command line, which wins, by presets too. With hydra.mode=RUN the base values alone.

    Args:
        overrides: `key=value` as on the command line; `a=1,2` sweeps.
        config_dir: further configuration files, looked at after `conf`.

    Raises:
        HydraException, OmegaConfBaseException: an unknown key, file or type, wherever it stands.
        SettingsError: a folder that does not exist, a Hydra plugin that would have no effect, a
            length that is given twice.
    """
    return _compose(overrides, conf, config_dir)[0]


def _compose(
    overrides: Sequence[str], conf: Path, config_dir: Path | None
) -> tuple[list[dict[str, Any]], str]:
    """-> the configurations and the name of Hydra's launcher; `basic` is none."""
    words = _words(overrides, config_dir)
    with hydra.initialize_config_dir(str(conf), job_name="harness", version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        parser = OverridesParser.create(config_loader=loader)
        is_group = groups(loader, config_dir)
        base, presets = _read(loader, is_group, words)
        _refuse_sweepers(base)
        launcher = str(base.hydra.runtime.choices.get("hydra/launcher"))
        if base.hydra.mode == RunMode.RUN:
            words += presets.further()
            one = loader.load_configuration("config", words, RunMode.RUN)
            return [config.to_plain(_own(one))], launcher
        params, typed = base.hydra.sweeper.params or {}, presets.typed
        given = {override.key_or_group: override for override in typed}
        if launcher != "basic":
            refuse_device_axis(given.get("device"), params, launcher)
        swept = parser.parse_overrides(axes(params, given))
        check(swept, is_group, SettingsError)
        if any(o.key_or_group == "experiment" and o.is_sweep_override() for o in [*swept, *typed]):
            raise WordError("experiment: give one, since each has its own list of axes")
        refuse_empty([*swept, *typed])
        (jobs,) = BasicSweeper.split_arguments([*swept, *typed], max_batch_size=None)
        # Of an axis that a preset stands for, all values are the same point.
        distinct = dict.fromkeys(tuple(presets.over_experiment(job)) for job in jobs)
        return _compose_jobs(loader, is_group, base, [list(job) for job in distinct]), launcher


def _read(loader: ConfigLoader, is_group: IsGroup, words: list[str]) -> tuple[DictConfig, Presets]:
    """Checks the words; -> the configuration before its axes are taken apart, Hydra's own part
    included, and the presets chosen."""
    parser = OverridesParser.create(config_loader=loader)
    check(parser.parse_overrides(words), is_group, WordError)
    base = _base(loader, words)
    # Not resolved: "${times:4,${batch}}" is each point's own, not the base configuration's.
    task = [str(word) for word in _unresolved(base.hydra.overrides.task)]
    return base, Presets(loader, is_group, words, parser.parse_overrides(task), base)


def _preset(overrides: Sequence[str], conf: Path, config_dir: Path | None) -> list[str]:
    """The words that the presets of a command line stand for where they would not win."""
    words = _words(overrides, config_dir)
    with hydra.initialize_config_dir(str(conf), job_name="harness", version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        return _read(loader, groups(loader, config_dir), words)[1].further()


def _submit(
    overrides: Sequence[str],
    conf: Path,
    config_dir: Path | None,
    task: Callable[[Any], int],
    jobs: Sequence[list[str]],
    folder: Path,
) -> Sequence[Any]:
    """Has Hydra's launcher run `task` once for each of `jobs`, each a list of overrides, below
    `folder`; -> Hydra's return of each, when all have ended."""
    own = [f"hydra.sweep.dir={quoted(str(folder))}", "hydra.output_subdir=null"]
    words = [*_words(overrides, config_dir), *own]
    with hydra.initialize_config_dir(str(conf), job_name="harness", version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        base = _base(loader, words)
        context = HydraContext(config_loader=loader, callbacks=Callbacks(base))
        launcher = Plugins.instance().instantiate_launcher(
            hydra_context=context, task_function=task, config=base
        )
        return launcher.launch(jobs, initial_job_idx=0)


def _words(overrides: Sequence[str], config_dir: Path | None) -> list[str]:
    resolvers.register()
    words = [_quote_arrivals(word) for word in overrides]
    if config_dir is not None:
        if not config_dir.is_dir():
            raise SettingsError(f"--config-dir {config_dir}: no such folder")
        words.append(f"hydra.searchpath=[{quoted(f'file://{config_dir.resolve()}')}]")
    return words


def _base(loader: ConfigLoader, words: list[str]) -> DictConfig:
    return loader.load_configuration(
        "config", overrides=words, run_mode=RunMode.MULTIRUN, validate_sweep_overrides=False
    )


def _unresolved(words: Any) -> list[Any]:
    plain = OmegaConf.to_container(words, resolve=False)
    assert isinstance(plain, list)
    return plain


def _compose_jobs(
    loader: ConfigLoader, is_group: IsGroup, base: DictConfig, jobs: list[list[str]]
) -> list[dict[str, Any]]:
    """Files are read once for every distinct choice of groups, and plain values set on copies: a
    full composition takes 0.1 s, which a sweep of a hundred points would feel."""
    parser = OverridesParser.create(config_loader=loader)
    words = {word: parser.parse_override(word) for job in jobs for word in job}
    is_value = {
        word: override.type == OverrideType.CHANGE
        and not isinstance(override.value(), dict)
        and not override.key_or_group.startswith("hydra")
        and not is_group(override.key_or_group)
        for word, override in words.items()
    }
    composed: dict[tuple[str, ...], DictConfig] = {}
    points = []
    for job in jobs:
        rest = tuple(word for word in job if not is_value[word])
        if rest not in composed:
            composed[rest] = _own(loader.load_sweep_config(base, list(rest)))
        one = copy.deepcopy(composed[rest])
        for word in job:
            if is_value[word]:
                OmegaConf.update(one, words[word].key_or_group, words[word].value())
        _refuse_double_lengths(one, [words[word].key_or_group for word in job])
        points.append(config.to_plain(one))
    return points


def _own(composed: DictConfig) -> DictConfig:
    """Without Hydra's part, and named after the experiment's file unless that says otherwise."""
    name = composed.hydra.runtime.choices.get("experiment")
    with read_write(composed), open_dict(composed):
        del composed["hydra"]
    composed.experiment = composed.experiment or name
    return composed


def _refuse_double_lengths(point: DictConfig, keys: Sequence[str]) -> None:
    double = [key for key in LENGTHS if key in keys]
    if point.workload.shape is not None and double:
        raise SettingsError(
            f"{SHAPE} and {double[0]}: shape sets both lengths; give one of the two"
        )


def _refuse_sweepers(base: DictConfig) -> None:
    choice = base.hydra.runtime.choices.get("hydra/sweeper")
    if choice != "basic":
        raise SettingsError(
            f"hydra/sweeper={choice}: a sweep is every combination of its axes; leave it out"
        )


def _quote_arrivals(word: str) -> str:
    """Hydra reads poisson(4) as a call of one of its own functions; in quotes it is a value."""
    if not word.startswith("workload.arrivals="):
        return word
    return re.sub(r"""(?<!["'])poisson\([^()]*\)""", lambda found: f'"{found[0]}"', word)


def _let_hydra_answer(arguments: Sequence[str], conf: Path) -> int:
    def nothing(_: DictConfig) -> None:
        raise AssertionError("only flags that run nothing come here")

    before = sys.argv
    sys.argv = ["python -m harness", *arguments]
    try:
        hydra.main(config_path=str(conf), config_name="config", version_base="1.3")(nothing)()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    finally:
        sys.argv = before
    return 0
