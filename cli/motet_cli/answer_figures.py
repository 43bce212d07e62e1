"""What `motet status` says about answers: where their time went, and how well promises and estimates fit. The gateway
counts it, since its start."""

import asyncio
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from motet.metrics_socket import read_metrics
from motet_cli.printer import Part

COLUMNS = (
    "tenant",
    "queue",
    "generation",
    "penalty",
    "overhead",
    "promised too much",
    "too short",
    "q90 covers",
    "parks",
)
ALL_TENANTS = "(all)"

_NUMBERS = {
    "motet_promised_tokens_total": "promised_tokens",
    "motet_promise_unused_tokens_total": "unused_tokens",
    "motet_promise_exceeded_tokens_total": "exceeded_tokens",
    "motet_promises_total": "promises",
    "motet_promises_exceeded_total": "promises_exceeded",
    "motet_estimates_judged_total": "judged",
    "motet_request_parks_total": "parks",
}
_BY_LABEL = {
    "motet_request_split_seconds_total": ("seconds", "part"),
    "motet_estimates_covered_total": ("covered", "quantile"),
}
_WEIGHTS_MADE = "motet_predictor_weights_made_seconds"
_PARTS = ("queue", "generation", "penalty", "overhead")


def read_figures(socket: Path) -> list[dict[str, Any]]:
    """By tenant, the one with most promised tokens first. Empty while nobody has asked, or the gateway does not
    answer."""
    text = asyncio.run(read_metrics(socket))
    return figures_of(text) if text else []


def weights_made(socket: Path) -> str | None:
    """When the predictor's weights were fitted; None if it does not answer, or has none yet."""
    from prometheus_client.parser import text_string_to_metric_families

    text = asyncio.run(read_metrics(socket))
    try:
        families = list(text_string_to_metric_families(text or ""))
    except ValueError:
        return None  # another version of the predictor
    values = [one.value for family in families for one in family.samples if one.name == _WEIGHTS_MADE]
    return datetime.fromtimestamp(values[0], UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if any(values) else None


def figures_of(text: str) -> list[dict[str, Any]]:
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, dict[str, Any]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name in _NUMBERS:
                    _of(found, sample.labels)[_NUMBERS[sample.name]] = int(sample.value)
                elif sample.name in _BY_LABEL:
                    name, label = _BY_LABEL[sample.name]
                    _of(found, sample.labels)[name][sample.labels[label]] = sample.value
    except (ValueError, KeyError):
        return []  # another version of the gateway
    return sorted(found.values(), key=lambda one: (-one["promised_tokens"], one["tenant"]))


def _of(found: dict[str, dict[str, Any]], labels: dict[str, str]) -> dict[str, Any]:
    tenant = labels.get("tenant", "")
    if tenant not in found:
        found[tenant] = {"tenant": tenant, "seconds": {}, "covered": {}} | dict.fromkeys(_NUMBERS.values(), 0)
    return found[tenant]


def row(figures: dict[str, Any]) -> list[Part]:
    seconds = figures["seconds"]
    whole = sum(seconds.values())
    return [
        figures["tenant"] or ALL_TENANTS,
        *(_share(seconds.get(part, 0.0), whole) for part in _PARTS),
        _share(figures["unused_tokens"], figures["promised_tokens"]),
        _share(figures["promises_exceeded"], figures["promises"]),
        _share(figures["covered"].get("q90", 0.0), figures["judged"]),
        str(figures["parks"]),
    ]


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"
