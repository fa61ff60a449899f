"""Combinations that an experiment leaves out, each with the reason that its rows give.

    skip:
      - when: {tp: 2, compile: layer}       # both
        reason: layers compiled apart are known to be slow here
      - when: {batch: [64, 256], model: "!=tiny", workload.prompt_tokens: ">=2048"}
        reason: does not fit into the cache

A rule is data: a value, a list of values, or a comparison (`>`, `>=`, `<`, `<=` with a number,
`!=` with any value) for each setting; all of them must hold.
"""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from harness.settings.config import CHOICES, SettingsError, as_written
from harness.settings.naming import SHORT, settings

_KEYS = ("when", "reason")
_COMPARISON = re.compile(r"(>=|<=|!=|>|<)\s*(.+)")
_ORDER: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt,
}  # fmt: skip


def skip_rule(cfg: Mapping[str, Any]) -> str | None:
    """The reason of the first rule of `cfg["skip"]` that a resolved configuration meets, or None.
    All rules are checked, met or not.

    Raises:
        SettingsError: something in a rule that is no rule; the text names its place.
    """
    rules, found = cfg["skip"], settings(cfg)
    if not isinstance(rules, list):
        raise SettingsError(f"skip={rules}: give a list of rules {{when: ..., reason: ...}}")
    met = [
        rule["reason"]
        for place, rule in enumerate(rules)
        if _meets(f"skip[{place}]", _checked(f"skip[{place}]", rule)["when"], found)
    ]
    return str(met[0]) if met else None


def _checked(name: str, rule: Any) -> dict[str, Any]:
    if not isinstance(rule, dict):
        raise SettingsError(f"{name}={rule}: a rule is {{when: {{SETTING: VALUE}}, reason: TEXT}}")
    for key in rule:
        if key not in _KEYS:
            raise SettingsError(f"{name}.{key}: a rule has when and reason{_near(key, _KEYS)}")
    if not isinstance(rule.get("reason"), str) or not rule["reason"].strip():
        raise SettingsError(f"{name}.reason: say why, since the skipped rows do")
    if not isinstance(rule.get("when"), dict) or not rule["when"]:
        raise SettingsError(f"{name}.when: name at least one setting, as in {{tp: 2}}")
    return rule


def _meets(name: str, when: Mapping[str, Any], found: Mapping[str, Any]) -> bool:
    wrong = [key for key in when if key not in found]
    if wrong:
        near = _near(SHORT.get(wrong[0], wrong[0]), found)
        raise SettingsError(f"{name}.when.{wrong[0]}: no such setting{near}")
    # No early end: what is wrong in a rule must be found whichever point is first.
    held = [_holds(f"{name}.when.{key}", want, key, found[key]) for key, want in when.items()]
    return all(held)


def _holds(name: str, wanted: Any, key: str, value: Any) -> bool:
    if isinstance(wanted, list):
        held = [_holds(name, one, key, value) for one in wanted]
        return any(held)
    compared = _COMPARISON.fullmatch(wanted) if isinstance(wanted, str) else None
    if compared is None:
        _check_value(name, wanted, key, value)
        return _equal(value, wanted)
    sign, text = compared.groups()
    if sign == "!=":
        _check_value(name, text, key, value)
        return not _equal(value, text)
    limit = _number(text)
    if limit is None or isinstance(value, bool | str):
        raise SettingsError(f"{name}={wanted}: {sign} compares numbers, and {key} is {value}")
    return value is not None and _ORDER[sign](value, limit)


def _check_value(name: str, wanted: Any, key: str, value: Any) -> None:
    """A value that the setting can never have is a slip."""
    choices = CHOICES.get({short: long for long, short in SHORT.items()}.get(key, key))
    if choices is not None and wanted not in choices:
        quotes = ' (in a YAML file write "off" in quotes)' if wanted is False else ""
        raise SettingsError(
            f"{name}={as_written(wanted)}: choose among {', '.join(choices)}{quotes}"
        )
    kind = "true or false" if isinstance(value, bool) else "a number"
    if isinstance(value, bool | int | float) and not _could_be(value, wanted):
        raise SettingsError(f"{name}={wanted}: {key} is {kind}, as in {as_written(value)}")


def _could_be(value: bool | int | float, wanted: Any) -> bool:
    if wanted is None or wanted == "null":
        return True
    if isinstance(value, bool):
        return as_written(wanted) in ("true", "false")
    return _number(wanted) is not None


def _equal(value: Any, wanted: Any) -> bool:
    if value is None or wanted is None:
        return value is None and wanted in (None, "null")
    if isinstance(value, int | float) and not isinstance(value, bool):
        return bool(_number(wanted) == value)
    return as_written(value) == as_written(wanted)


def _number(wanted: Any) -> float | None:
    if isinstance(wanted, bool):
        return None
    try:
        return float(wanted)
    except (TypeError, ValueError):
        return None


def _near(name: str, known: Any) -> str:
    near = difflib.get_close_matches(str(name), list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""
