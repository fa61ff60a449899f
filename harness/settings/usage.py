"""What each verb's own `--help` prints; made without importing anything heavy"""

from __future__ import annotations

_SETTINGS = """\
Settings are name=value, in any order; a list sweeps (tp=1,2), +experiment=NAME takes one of the
experiments of python -m harness --help, --config-dir DIR adds your own."""

RUN = f"""\
python -m harness [run] +experiment=NAME [SETTING=VALUE ...] [--config-dir DIR]

Runs a sweep, or continues one that was broken off. Every point ends as a row; the last line on
stdout is JSON for scripts. Exit status 0: every point is ok, skipped or contaminated, and be they
all skipped; 1: one is not, or a setting is wrong; 130: interrupted.
  fail_fast=true        stops behind the first failure; the same command goes on from there
  measure.point_timeout_s=60   ends a point that hangs as timeout; the next one is run
  resume=never|RUN      a new run, or that one
  device_lock=refuse    ends with 1 where another run is timing on one of its devices; it waits else
  hydra/launcher=submitit_slurm|ray   as jobs, an engine each (docs/cluster.md)

{_SETTINGS}"""
LIST = f"""\
python -m harness list +experiment=NAME [SETTING=VALUE ...] [--config-dir DIR]

Prints the points in the order in which they would run, which are skipped and why, and how long it
may take by the nearest points of earlier runs in results_dir on this machine. Starts nothing.

{_SETTINGS}"""
PROFILE = f"""\
python -m harness profile +experiment=NAME [SETTING=VALUE ...] [--config-dir DIR]
python -m harness profile --read EXPORT.sqlite

Runs one point under nsys, one pass of it captured on all ranks, and prints what the kernels took;
or prints that of an export, made anywhere.

{_SETTINGS}"""
COLLECT = """\
python -m harness collect RUN [RUN ...] [--markdown | --csv | --json | --repeats]
        [--across-machines]

Prints the tables of a run again, from its files, or of several runs as one; a fan-out's folder
stands for its jobs' runs. A point that several hold is taken from one of them, as stderr says;
figures of several machines are refused (exit status 2) without --across-machines. --markdown,
--csv and --json are a row a point, with what it was measured on; in JSON a missing figure is null,
and the row's `reasons` say why.
--repeats is a row a repeat as CSV, which compare reads."""
COMPARE = """python -m harness compare A B [--metrics M,M] [--floor 0.03] [--across-machines]
        [--fail-on slower|ambiguous] [--markdown | --csv | --json]"""
WHOLE_COMPARE = f"""\
{COMPARE}

Judges run B against run A, cell by cell: SAME, FASTER, SLOWER or AMBIGUOUS. Each is the folder of a
run, of a fan-out, or a published one, which holds points/ or repeats.csv. A verdict needs 5 repeats
a side and several fresh engines, 5 as a rule (measure.n_process=5), or one engine and --floor, the
ratio by which fresh engines differ here (docs/verdicts.md). Exit status 1: something is SLOWER (or
AMBIGUOUS, if asked for); 2: the two cannot be compared."""
CALIBRATE = """\
python -m harness calibrate [--world 1,2] [--again] [--markdown | --json]
        [--results-dir results/runs]

Measures what this machine can do, once: read bandwidth, matmul rate, and the collectives by size
over --world ranks (default: every size that fits). Parts that are there are kept, unless --again.
The file is hardware/<fingerprint>.json beside the runs' folder. Exit status 1: a part failed."""
PREDICT = """\
python -m harness predict RUN [RUN ...] [--tp 4,8] [--batch 1,32] [--model NAME,NAME]
        [--calibration FILE] [--markdown | --csv]

Step times of cells that the runs do not hold, from a fit to those that they hold and from the
machine's calibration, with the errors on cells left out. Exit status 1: nothing could be
predicted; 2: the command line is wrong, or a run is missing."""
DOCTOR = """\
python -m harness doctor

Says what is installed, what can run on this machine, and what to install for the rest."""

USAGE = {
    "run": RUN,
    "list": LIST,
    "profile": PROFILE,
    "collect": COLLECT,
    "compare": WHOLE_COMPARE,
    "calibrate": CALIBRATE,
    "predict": PREDICT,
    "doctor": DOCTOR,
}
