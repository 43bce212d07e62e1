"""AIPerf, NVIDIA's load generator."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.clients.drivers.protocol import LOAD_REQUESTS, Asked, serve


def load(asked: Asked) -> None:
    with tempfile.TemporaryDirectory() as name:
        options = {
            "--model": asked.adapter,
            "--url": asked.url.removesuffix("/v1"),
            "--endpoint-type": "chat",
            "--tokenizer": asked.tokenizer,
            "--concurrency": "4",
            "--request-count": str(LOAD_REQUESTS),
            "--synthetic-input-tokens-mean": "20",
            "--output-tokens-mean": "16",
            "--artifact-dir": name,
            "--ui": "none",
        }
        words = [word for option in options.items() for word in option]
        program = str(Path(sys.executable).with_name("aiperf"))
        subprocess.run([program, "profile", "--streaming", *words], check=True, timeout=300)
        (file,) = Path(name).rglob("profile_export_aiperf.json")
        found = json.loads(file.read_text())
    assert found["request_count"]["avg"] == LOAD_REQUESTS, found
    assert not found.get("error_summary"), found


if __name__ == "__main__":
    serve({"load": load})
