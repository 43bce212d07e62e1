"""curl, a program of the machine."""

import json
import subprocess
from typing import Any

from tools.clients.drivers.protocol import Asked, serve


def run(
    asked: Asked, path: str, body: Any = None, *more: str, broken: bool = False
) -> "subprocess.CompletedProcess[str]":
    url = (asked.broken_url if broken else asked.url) + path
    sent = ["-H", "Content-Type: application/json", "-d", json.dumps(body)] if body is not None else []
    return subprocess.run(
        ["curl", "-sS", "-N", *more, *sent, url], capture_output=True, text=True, timeout=60, check=False
    )


def question(asked: Asked, **more: Any) -> dict[str, Any]:
    return {"model": asked.adapter, "messages": asked.messages, "temperature": 0} | more


def list_models(asked: Asked) -> None:
    assert asked.adapter in [model["id"] for model in json.loads(run(asked, "/models").stdout)["data"]]


def chat(asked: Asked) -> None:
    answer = json.loads(run(asked, "/chat/completions", question(asked)).stdout)
    assert answer["choices"][0]["message"]["content"] == asked.answer, answer


def stream(asked: Asked) -> None:
    lines = run(asked, "/chat/completions", question(asked, stream=True)).stdout.splitlines()
    chunks = [line.removeprefix("data: ") for line in lines if line]
    assert chunks.pop() == "[DONE]"
    said = (choice["delta"].get("content") or "" for chunk in chunks for choice in json.loads(chunk)["choices"])
    assert "".join(said) == asked.answer


def structured(asked: Asked) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": asked.schema}}
    answer = run(asked, "/chat/completions", question(asked, response_format=form, max_tokens=200))
    asked.check_object(json.loads(answer.stdout)["choices"][0]["message"]["content"])


def cancel(asked: Asked) -> None:
    run(asked, "/chat/completions", question(asked, stream=True, max_tokens=1500, ignore_eos=True), "--max-time", "0.5")


def errors(asked: Asked) -> None:
    answer = run(asked, "/chat/completions", question(asked, model="nobody"), "--fail-with-body")
    assert answer.returncode == 22, answer
    assert json.loads(answer.stdout)["error"]["code"] == "model_not_found", answer


def broken(asked: Asked) -> None:
    answer = run(asked, "/chat/completions", question(asked, stream=True), broken=True)
    assert answer.returncode, "it ended as if the stream were whole"


if __name__ == "__main__":
    serve(
        {
            "list": list_models,
            "chat": chat,
            "stream": stream,
            "structured": structured,
            "cancel": cancel,
            "errors": errors,
            "broken": broken,
        }
    )
