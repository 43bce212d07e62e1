"""What a metric says now."""

from prometheus_client import Counter, Gauge


def value_of(metric: Counter | Gauge) -> float:
    """Of one without labels, or of one set of labels."""
    (found,) = metric.collect()
    return found.samples[0].value
