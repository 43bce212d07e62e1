"""`vllm bench serve`. Its own command asks for the package `vllm`, and a build for CPUs has another name."""

import argparse
import asyncio
import json
import tempfile
from pathlib import Path

from vllm.benchmarks.serve import add_cli_args, main_async

from tools.clients.drivers.protocol import LOAD_REQUESTS, Asked, serve


def load(asked: Asked) -> None:
    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    with tempfile.TemporaryDirectory() as name:
        options = {
            "--backend": "openai-chat",
            "--endpoint": "/v1/chat/completions",
            "--base-url": asked.url.removesuffix("/v1"),
            "--model": asked.adapter,
            "--tokenizer": asked.tokenizer,
            "--dataset-name": "random",
            "--random-input-len": "20",
            "--random-output-len": "16",
            "--num-prompts": str(LOAD_REQUESTS),
            "--max-concurrency": "4",
            "--result-dir": name,
            "--result-filename": "result.json",
        }
        words = [word for option in options.items() for word in option]
        asyncio.run(main_async(parser.parse_args([*words, "--ignore-eos", "--save-result"])))
        found = json.loads((Path(name) / "result.json").read_text())
    assert found["completed"] == LOAD_REQUESTS, found
    assert found["total_output_tokens"] == 16 * LOAD_REQUESTS, found


if __name__ == "__main__":
    serve({"load": load})
