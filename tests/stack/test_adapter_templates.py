"""Adapters that bring a chat template of their own, through the whole stack."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.local_stack import BUNDLED, LocalStack, copy_of_bundled, running_stack, write_adapter

pytestmark = pytest.mark.stack

QUESTION = [{"role": "user", "content": "Who rules Harrow?"}]
TEMPLATE = (
    "{% for message in messages %}<|user|>{{ '# ' * times }}{{ message.content }}<|end|>{% endfor %}<|assistant|>"
)


def adapter(folder: Path, name: str, template: str) -> str:
    own = folder / name
    shutil.copytree(BUNDLED / "adapters" / "pirate", own)
    (own / "chat_template.jinja").write_text(template)
    return own.as_uri()


def marked(times: int) -> str:
    """A template whose prompts have one token more for each time"""
    return TEMPLATE.replace("times", str(times))


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    folder = tmp_path_factory.mktemp("stack")
    manifests = copy_of_bundled(folder / "manifests", adapters=["pirate"])
    write_adapter(manifests, "own", uri=adapter(folder, "own", marked(2)))
    with running_stack(folder, manifests=manifests) as running:
        running.until(lambda: all(one["ready"] for one in running.status()["adapters"]))
        yield running


def prompt_of(stack: LocalStack, model: str) -> str:
    with stack.http() as client:
        said = client.post("/tokenize", json={"model": model, "messages": QUESTION})
        assert said.status_code == 200, said.text
        text = client.post("/detokenize", json={"model": model, "tokens": said.json()["tokens"]})
        return str(text.json()["prompt"])


def test_an_adapter_with_its_own_template_is_asked_by_it_and_others_by_the_models(stack: LocalStack) -> None:
    assert prompt_of(stack, "own") == "<|user|># # Who rules Harrow?<|end|><|assistant|>"
    for other in ("pirate", "motet-demo"):
        assert prompt_of(stack, other) == "<|user|>Who rules Harrow?<|end|><|assistant|>"
