"""Adapters that bring a chat template of their own, through the whole stack."""

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testbed.local_stack import BUNDLED, LocalStack, copy_of_bundled, running_stack, write_adapter

pytestmark = pytest.mark.stack

QUESTION = [{"role": "user", "content": "Who rules Harrow?"}]
TEMPLATE = (
    "{% for message in messages %}<|user|>{{ 'x ' * times }}{{ message.content }}<|end|>{% endfor %}<|assistant|>"
)


def adapter(folder: Path, name: str, template: str, *, of: str = "pirate") -> str:
    own = folder / name
    shutil.copytree(BUNDLED / "adapters" / of, own)
    (own / "chat_template.jinja").write_text(template)
    return own.as_uri()


def trained(folder: Path) -> str:
    """With the model's template and tokenizer, as a training that adds an end token saves them"""
    own, model = folder / "trained", BUNDLED / "model"
    shutil.copytree(BUNDLED / "adapters" / "pirate", own)
    shutil.copy(model / "chat_template.jinja", own)
    config = json.loads((model / "tokenizer_config.json").read_text())
    (own / "tokenizer_config.json").write_text(json.dumps(config | {"unk_token": "<|end|>"}))
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["pre_tokenizer"]["trim_offsets"] = not tokenizer["pre_tokenizer"]["trim_offsets"]
    end = next(one["id"] for one in tokenizer["added_tokens"] if one["content"] == "<|end|>")
    post_processor = tokenizer["post_processor"]
    post_processor["single"].append({"SpecialToken": {"id": "<|end|>", "type_id": 0}})
    post_processor["special_tokens"] = {"<|end|>": {"id": "<|end|>", "ids": [end], "tokens": ["<|end|>"]}}
    (own / "tokenizer.json").write_text(json.dumps(tokenizer))
    return own.as_uri()


def marked(times: int) -> str:
    """A template whose prompts are longer by this number of words"""
    return TEMPLATE.replace("times", str(times))


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    folder = tmp_path_factory.mktemp("stack")
    manifests = copy_of_bundled(folder / "manifests", adapters=["pirate"])
    write_adapter(manifests, "own", uri=adapter(folder, "own", marked(2)))
    write_adapter(manifests, "moved", uri=adapter(folder, "moved", marked(2)))
    write_adapter(manifests, "trained", uri=trained(folder))
    write_adapter(manifests, "broken", uri=adapter(folder, "broken", "{% for message in messages %}\n{{ message }"))
    with running_stack(folder, manifests=manifests) as running:
        running.until(lambda: condition(running, "broken")["reason"] == "FormatRejected")
        names = ("own", "moved", "trained", "pirate")
        running.until(lambda: all(condition(running, name)["status"] == "True" for name in names))
        yield running


def condition(stack: LocalStack, name: str) -> dict[str, Any]:
    found = [one for one in stack.status()["adapters"] if one["name"] == name]
    ready = [each for one in found for each in one["conditions"] if each["type"] == "Ready"]
    return ready[0] if ready else {"status": "", "reason": "", "message": ""}


def prompt_of(stack: LocalStack, model: str) -> str:
    with stack.http() as client:
        said = client.post("/tokenize", json={"model": model, "messages": QUESTION})
        assert said.status_code == 200, said.text
        text = client.post("/detokenize", json={"model": model, "tokens": said.json()["tokens"]})
        return str(text.json()["prompt"])


def test_an_adapter_is_asked_by_its_own_template_and_others_by_the_models(stack: LocalStack) -> None:
    assert prompt_of(stack, "own") == "<|user|>x x Who rules Harrow?<|end|><|assistant|>"
    for other in ("pirate", "motet-demo"):
        assert prompt_of(stack, other) == "<|user|>Who rules Harrow?<|end|><|assistant|>"
    asked = {"messages": QUESTION, "max_tokens": 4}
    with stack.http() as client:
        used = [
            client.post("/v1/chat/completions", json={"model": model, **asked}).json()["usage"]["prompt_tokens"]
            for model in ("own", "pirate")
        ]
    assert used[0] > used[1]


def test_a_template_that_is_no_jinja_is_refused_with_its_place(stack: LocalStack) -> None:
    assert "chat_template.jinja, line 2: " in condition(stack, "broken")["message"]


def test_the_status_names_the_template(stack: LocalStack) -> None:
    digests = {one["name"]: (one["certificate"] or {}).get("templateDigest") for one in stack.status()["adapters"]}
    assert digests["own"].startswith("sha256:")
    assert digests["pirate"] is None


def test_the_models_template_and_tokenizer_saved_again_are_the_models(stack: LocalStack) -> None:
    (found,) = [one for one in stack.status()["adapters"] if one["name"] == "trained"]
    assert found["certificate"].get("templateDigest") is None
    (warning,) = found["certificate"]["warnings"]
    assert warning.startswith("tokenizer.json: post_processor adds other tokens than the base model's tokenizer")
    assert prompt_of(stack, "trained") == prompt_of(stack, "pirate")


def test_no_prompt_of_one_revision_meets_the_weights_of_another(stack: LocalStack) -> None:
    """While requests go on, the adapter gets other weights with another template, and then the first ones again."""
    lengths: dict[int, int] = {}
    seen: list[tuple[str, int]] = []
    wrong: list[str] = []
    over = threading.Event()

    def ask() -> None:
        with stack.http() as client:
            while not over.is_set():
                said = client.post(
                    "/v1/chat/completions", json={"model": "moved", "messages": QUESTION, "max_tokens": 1}
                )
                if said.status_code == 200:
                    seen.append((said.json()["system_fingerprint"], said.json()["usage"]["prompt_tokens"]))
                else:
                    wrong.append(said.text)

    assert stack.manifests is not None
    asking = [threading.Thread(target=ask) for _ in range(3)]
    for thread in asking:
        thread.start()
    try:
        for times, of in ((6, "shouting"), (2, "pirate"), (9, "shouting")):
            uri = adapter(stack.folder, f"revision-{times}", marked(times), of=of)
            write_adapter(stack.manifests, "moved", uri=uri)
            stack.until(lambda times=times: prompt_of(stack, "moved").count("x ") == times)
            before = len(seen)
            stack.until(lambda before=before: len(seen) > before + 20)
            lengths[times] = seen[-1][1]
    finally:
        over.set()
        for thread in asking:
            thread.join()
    assert not wrong, wrong[:3]
    assert len(set(lengths.values())) == 3
    by_weights: dict[str, set[int]] = {}
    for fingerprint, tokens in seen:
        by_weights.setdefault(fingerprint, set()).add(tokens)
    assert all(len(tokens) == 1 for tokens in by_weights.values()), by_weights
    assert len(by_weights) == 3, "the second revision has the bytes of the first one"
