"""Motet's own form of a workload: a JSON object on each line, in order of time. What has its default is left out."""

import json
from collections.abc import Iterable
from typing import Any, TextIO

from motet.errors import SetupError
from motet_simulator.lines import MAX_ROWS
from motet_simulator.workloads.request import BLOCK_TOKENS, WorkloadRequest


def line_of(request: WorkloadRequest) -> str:
    said: dict[str, Any] = {
        "at": round(request.at, 6),
        "prompt_tokens": request.prompt_tokens,
        "output_tokens": request.output_tokens,
    }
    if request.max_tokens:
        said["max_tokens"] = request.max_tokens
    if request.tenant:
        said["tenant"] = request.tenant
    if request.adapter:
        said["adapter"] = request.adapter
    if request.request_class != "standard":
        said["class"] = request.request_class
    if request.blocks:
        said["blocks"] = list(request.blocks)
        if request.block_tokens != BLOCK_TOKENS:
            said["block_tokens"] = request.block_tokens
    return json.dumps(said)


def write(requests: Iterable[WorkloadRequest], to: TextIO) -> int:
    """Returns how many there were. Raises SetupError for more than a workload may have."""
    written = 0
    for written, request in enumerate(requests, 1):
        if written > MAX_ROWS:
            raise SetupError(f"A workload has at most {MAX_ROWS:,} requests.")
        to.write(line_of(request) + "\n")
    return written
