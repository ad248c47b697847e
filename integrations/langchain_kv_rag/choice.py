"""Per-call settings: ``kv_mode``, ``kv_keep`` and ``kv_method``, as arguments or in ``config["configurable"]``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from langchain_core.runnables import RunnableConfig, ensure_config

from kv_rag import Choice

SETTINGS = {"kv_mode": "mode", "kv_keep": "keep", "kv_method": "method"}


def configured(config: RunnableConfig | None) -> dict[str, Any]:
    """Those of SETTINGS that ``config``, or the config of the chain around this call, holds."""
    configurable = ensure_config(config).get("configurable") or {}
    return {name: configurable[name] for name in SETTINGS if configurable.get(name) is not None}


def chosen(usual: Choice, settings: Mapping[str, Any]) -> Choice:
    """``usual`` with the SETTINGS in ``settings`` in place of its own.

    Raises:
        InvalidSetting: unknown mode, keep out of range.

    """
    given = {SETTINGS[name]: value for name, value in settings.items() if value is not None}
    choice = Choice(**{"mode": usual.mode, "keep": usual.keep, "method": usual.method, **given})
    return choice if choice.keep is None else replace(choice, keep=carried(choice.keep))


def carried(keep: float) -> float:
    """``keep`` as a reference carries it, in ten digits: a state kept at 1/3 would not be found by 0.3333333333."""
    return float(f"{keep:.10g}")
