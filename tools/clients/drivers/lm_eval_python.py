"""lm-evaluation-harness: it compares answers, and scores them by the log probabilities of a prompt's tokens."""

import json
import tempfile
from pathlib import Path
from typing import Any

import lm_eval  # type: ignore[import-not-found]
from lm_eval.tasks import TaskManager  # type: ignore[import-not-found]

from tools.clients.drivers.protocol import Asked, serve


def measured(asked: Asked, model: str, path: str, chat_template: bool, task: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        rows = Path(name) / "rows.jsonl"
        wrong = " ".join(reversed(asked.answer.split()))
        rows.write_text(json.dumps({"question": asked.question, "choices": [wrong, asked.answer], "right": 1}) + "\n")
        named = {"task": "rows", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(rows)}}}
        results = lm_eval.simple_evaluate(
            model=model,
            model_args={
                "model": asked.adapter,
                "base_url": asked.url + path,
                "tokenizer": asked.tokenizer,
                "num_concurrent": 2,
                "max_retries": 1,
            },
            tasks=[named | {"test_split": "test"} | task],
            task_manager=TaskManager(include_defaults=False),
            apply_chat_template=chat_template,
            bootstrap_iters=0,
        )
    found: dict[str, Any] = results["results"]["rows"]
    return found


def chat(asked: Asked) -> None:
    found = measured(
        asked,
        "local-chat-completions",
        "/chat/completions",
        True,
        {
            "output_type": "generate_until",
            "doc_to_text": "{{question}}",
            "doc_to_target": "{{choices[1]}}",
            "generation_kwargs": {"until": [], "max_gen_toks": 100, "temperature": 0},
            "metric_list": [{"metric": "exact_match"}],
        },
    )
    assert found["exact_match,none"] == 1, found


def logprobs(asked: Asked) -> None:
    found = measured(
        asked,
        "local-completions",
        "/completions",
        False,
        {
            "output_type": "multiple_choice",
            "doc_to_text": "{{question}}",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "right",
            "metric_list": [{"metric": "acc"}],
        },
    )
    assert found["acc,none"] == 1, found


if __name__ == "__main__":
    serve({"chat": chat, "logprobs": logprobs})
