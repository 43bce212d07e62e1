"""What a process says in its metrics."""

import urllib.error
import urllib.request


def page(address: str, path: str = "metrics") -> tuple[int, str]:
    """What is answered on a health port; status 0 when nothing is."""
    try:
        with urllib.request.urlopen(f"http://{address}/{path}", timeout=2) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


def metric(address: str, name: str) -> float:
    """The sum of a metric over its labels."""
    _, text = page(address)
    lines = [line for line in text.splitlines() if line.split("{")[0].split(" ")[0] == name]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)
