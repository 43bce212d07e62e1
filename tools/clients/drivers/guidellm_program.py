"""GuideLLM, a load generator of vLLM's project."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.clients.drivers.protocol import LOAD_REQUESTS, Asked, serve


def load(asked: Asked) -> None:
    with tempfile.TemporaryDirectory() as name:
        options = {
            "--backend": f"kind=openai_http,target={asked.url.removesuffix('/v1')},model={asked.adapter}",
            "--tokenizer": f"kind=huggingface_auto,model={asked.tokenizer}",
            "--profile": "kind=concurrent,streams=4",
            "--constraint": f"kind=max_requests,count={LOAD_REQUESTS}",
            "--data": "kind=synthetic_text,prompt_tokens=20,output_tokens=16",
            "--output": f"kind=json,path={name}/report.json",
        }
        words = [word for option in options.items() for word in option]
        program = str(Path(sys.executable).with_name("guidellm"))
        subprocess.run([program, "run", *words], check=True, timeout=300)
        (file,) = Path(name).rglob("*.json")
        (measured,) = json.loads(file.read_text())["benchmarks"]
    totals = measured["metrics"]["request_totals"]
    assert totals["successful"] == LOAD_REQUESTS, totals
    assert totals["errored"] == 0, totals


if __name__ == "__main__":
    serve({"load": load})
