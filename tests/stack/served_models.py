"""Random base models and adapters for the whole stack. transformers and PEFT check their answers.

HTTP shows only tokens. At every position, given the stream's own tokens before it, the stream's token must be the best
one of the reference, or within 1e-4 of it. The tokenizer writes every id as a word, so the text of an answer gives its
tokens back exactly.
"""

import asyncio
import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import torch
from openai import AsyncOpenAI
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedConfig

from testbed.local_stack import write_adapter
from tests.runner.random_models import EIGHT, VOCABULARY, RandomAdapter, save_adapter, save_base

NEAR_TIE = 1e-4


@dataclass(frozen=True)
class ServedModel:
    model: str
    """The name that clients use."""
    adapter: Path | None


@dataclass
class StreamedAnswer:
    served_model: ServedModel
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Of the tokens, if they were asked for"""
    arrivals: list[float] = field(default_factory=list)
    """When each chunk arrived, on the monotonic clock."""
    reasons: list[str] = field(default_factory=list)
    request: str = ""
    """The gateway's id of the request."""
    asked: float = 0.0
    """When the request was sent, on the same clock."""
    placed_after: float | None = None
    """Seconds from the request's arrival until it was placed, from the gateway's `server-timing`; None if the stream
    was opened before that."""


def save_tokenizer(folder: Path) -> None:
    """Token 17 is the word `w17`."""
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Sequence([decoders.Replace("w", " w"), decoders.Fuse()])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


def add_pool(
    manifests: Path,
    family: str,
    *,
    engine: dict[str, Any],
    specs: Sequence[RandomAdapter] = EIGHT,
    config: PreTrainedConfig | None = None,
    replicas: int = 1,
) -> tuple[Path, list[ServedModel]]:
    """Write a base model, its adapters and the manifests of a pool. Returns the base and all models, the base first."""
    pool = family.replace("_", "-")
    base = save_base(family, manifests / family, config=config)
    save_tokenizer(base)
    spec = {"model": {"uri": f"file://{family}", "servedName": f"base-{pool}"}, "engine": engine, "replicas": replicas}
    manifest = {"apiVersion": "motet.dev/v1alpha1", "kind": "ServingPool", "metadata": {"name": pool}, "spec": spec}
    (manifests / f"{pool}.json").write_text(json.dumps(manifest))
    served_models = [ServedModel(f"base-{pool}", None)]
    for index, adapter_spec in enumerate(specs):
        name = f"{pool}-{index}"
        adapter = save_adapter(base, family, adapter_spec, manifests / "adapters" / name, seed=index)
        write_adapter(manifests, name, uri=adapter.as_uri(), poolRef={"name": pool})
        served_models.append(ServedModel(name, adapter))
    return base, served_models


def prompt_of(index: int, *, shortest: int = 5, spread: int = 90) -> list[int]:
    generator = torch.Generator().manual_seed(index)
    length = shortest + (index * 37) % spread
    return [int(token) for token in torch.randint(2, VOCABULARY, (length,), generator=generator)]


async def stream(
    client: AsyncOpenAI,
    served_model: ServedModel,
    prompt: list[int],
    tokens: int,
) -> StreamedAnswer:
    """One greedy answer of exactly `tokens` tokens, through the OpenAI client."""
    answer = StreamedAnswer(served_model, prompt)
    chunks = await client.completions.create(
        model=served_model.model,
        prompt=prompt,
        max_tokens=tokens,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    async for chunk in chunks:
        for choice in chunk.choices:
            if choice.text:
                answer.arrivals.append(time.monotonic())
                answer.tokens += [int(word[1:]) for word in choice.text.split()]
            if choice.finish_reason:
                answer.reasons.append(choice.finish_reason)
    return answer


async def stream_without_library(
    url: str,
    served_model: ServedModel,
    prompt: list[int],
    tokens: int,
    *,
    on_chunk: Callable[[StreamedAnswer], None] | None = None,
    **sampling: float,
) -> StreamedAnswer:
    """The same without a client library: at thousands of chunks a second, the test would measure the library.

    `sampling`: further fields of the call, such as a temperature.
    """
    answer = StreamedAnswer(served_model, prompt)
    host, port = url.removeprefix("http://").split(":")
    body = {"model": served_model.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
    content = orjson.dumps(body | {"ignore_eos": True} | sampling)
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}:{port}\r\ncontent-type: application/json\r\n"
        answer.asked = time.monotonic()
        writer.write(f"{head}content-length: {len(content)}\r\nconnection: close\r\n\r\n".encode() + content)
        status = await reader.readline()
        if b" 200 " not in status:
            raise AssertionError((status + await reader.read()).decode())
        while (header := (await reader.readline()).decode().strip()) != "":
            if header.startswith("x-motet-request:"):
                answer.request = header.partition(":")[2].strip()
            elif header.startswith("server-timing:"):
                spans = dict(re.findall(r"(\w+);dur=([\d.]+)", header))
                if "queue" in spans:
                    answer.placed_after = (float(spans["prepare"]) + float(spans["queue"])) / 1000
        async for line in reader:
            if not line.startswith(b"data: {"):
                continue
            event = orjson.loads(line[6:])
            assert "error" not in event, event
            for choice in event["choices"]:
                if choice["text"]:
                    answer.arrivals.append(time.monotonic())
                    answer.tokens += [int(word[1:]) for word in choice["text"].split()]
                if choice["logprobs"]:
                    answer.logprobs += choice["logprobs"]["token_logprobs"]
                if choice["finish_reason"]:
                    answer.reasons.append(choice["finish_reason"])
            if on_chunk is not None:
                on_chunk(answer)
    finally:
        writer.close()
    return answer


def departures(logits: torch.Tensor, tokens: Sequence[int]) -> list[tuple[int, float]]:
    """The positions at which a stream's token is not the reference's best one, and by how much the best is better.

    `logits` are those of the reference after the stream's own tokens, so tokens after a departure are checked, too.
    """
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    gaps = logits.max(dim=1).values - chosen
    return [(position, float(gap)) for position, gap in enumerate(gaps) if gap > 0]


def all_departures(base: Path, answers: Sequence[StreamedAnswer]) -> list[tuple[int, float]]:
    from peft import PeftModel

    found = []
    for served_model in {answer.served_model for answer in answers}:
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        if served_model.adapter is not None:
            model = PeftModel.from_pretrained(model, str(served_model.adapter))
        model.eval()
        for answer in answers:
            if answer.served_model != served_model:
                continue
            with torch.inference_mode():
                logits = model(torch.tensor([[*answer.prompt, *answer.tokens[:-1]]])).logits[0]
            found += departures(logits[len(answer.prompt) - 1 :], answer.tokens)
    return found


def assert_right(base: Path, answers: Sequence[StreamedAnswer]) -> None:
    """Every token of every answer is the reference's best, or as good. Prints how many were as good."""
    assert all(answer.tokens for answer in answers)
    found = all_departures(base, answers)
    print(f"{len(found)} tokens of {len(answers)} streams were another of two that are as good: {found}")
    assert all(gap < NEAR_TIE for _, gap in found), found
