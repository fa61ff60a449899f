"""workload.shape: prompt and output lengths as one setting, so that a sweep can link them"""

from __future__ import annotations

import re
from typing import Any

from harness.settings.config import FIXED_BATCH, SettingsError

_SHAPE = re.compile(r"([1-9]\d*)/([1-9]\d*)")


def linked(work: dict[str, Any]) -> dict[str, Any]:
    """A `workload` section without `shape`, which has become prompt_tokens and output_tokens: a
    point is the same one however its lengths were written.

    Raises:
        SettingsError: not PROMPT/OUTPUT, or of a workload that has lengths of its own.
    """
    work = dict(work)
    shape = work.pop("shape")
    if shape is None:
        return work
    found = _SHAPE.fullmatch(shape)
    if found is None:
        raise SettingsError(
            f"workload.shape={shape}: give tokens of the prompt and of the output, each at least "
            "1, as in 128/512"
        )
    if work["kind"] not in FIXED_BATCH:
        raise SettingsError(
            f"workload.shape={shape}: the requests of {work['kind']} have lengths of their own; "
            f"use workload={FIXED_BATCH[0]}"
        )
    return {**work, "prompt_tokens": int(found[1]), "output_tokens": int(found[2])}
