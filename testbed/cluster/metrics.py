"""Reads the metrics and health of a process."""

import urllib.error
import urllib.request

from prometheus_client.parser import text_string_to_metric_families


def page(address: str, path: str = "metrics") -> tuple[int, str]:
    """The answer of a health port; status 0 if there is none."""
    try:
        with urllib.request.urlopen(f"http://{address}/{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


def metric(address: str, name: str, **labels: str) -> float:
    """The sum of a metric over all labels that are not given. Raises OSError if the process does not answer."""
    status, text = page(address)
    if status != 200:
        raise ConnectionError(f"{address} does not tell its metrics: {status} {text}")
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )
