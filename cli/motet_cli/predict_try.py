"""`motet predict try`: how long the answer to a text would be estimated, and what moved that.

The gateway tokenises the text, the predictor of this state directory explains its estimate, and only this process puts
the two together: the predictor knows hashes of tokens, and the key is a file of the gateway."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import httpx2 as httpx
import orjson
import typer
from pydantic import BaseModel, ConfigDict, Field

from motet.api.v1 import common_pb2, predictor_pb2
from motet.errors import SetupError
from motet.json_object import json_object
from motet.read_settings import read
from motet.transport import CallFailed
from motet.transport.methods import EXPLAIN_ESTIMATE
from motet.transport.over_grpc import GrpcNetwork
from motet_cli.gateway_client import NO_GATEWAY, client_of, is_utf8, message_of, of_a_gateway
from motet_cli.printer import Printer, visible
from motet_cli.readiness import read_status
from motet_gateway.estimator import scope_name
from motet_gateway.features_key import FEATURES_KEY_FILE, read_key
from motet_gateway.prompt_features import FeatureName, PromptFeatures
from motet_gateway.settings import Settings
from motet_operator.local.state_directory import StateDirectory

EXPLAIN_SECONDS = 5.0
KEY_SETTING = "MOTET_GATEWAY_FEATURES_KEY_FILE"
_SPACES = str.maketrans("Ġ▁", "  ")
"""How vocabularies write the space before a word"""


def try_(
    data_dir: Path, text: str, *, adapter: str, tenant: str, max_tokens: int, temperature: float, as_json: bool
) -> int:
    layout = StateDirectory.of(data_dir)
    for field, given in (("TEXT", text), ("--adapter", adapter), ("--tenant", tenant)):
        if not is_utf8(given):
            raise SetupError(f"{field} is not UTF-8. Write it in UTF-8.")
    chat = {"model": adapter, "messages": [{"role": "user", "content": text}], "return_token_strs": True}
    with client_of(data_dir) as client, of_a_gateway(hint=f"{NO_GATEWAY} See `motet status`."):
        prompt_text = PromptTokens.model_validate(_asked(client, "/tokenize", chat))
        ids, words = prompt_text.tokens, dict(zip(prompt_text.tokens, prompt_text.token_strs, strict=True))
        card = _card(client, adapter)
        base_digest = (card if card.parent is None else _card(client, card.parent)).digest or ""
    name = full_name(card, adapter, read_status(layout).get("adapters", []))
    limit = max_tokens or max(1, prompt_text.max_model_len - len(ids))
    made = _features(read(Settings).features_key_file or layout.data / FEATURES_KEY_FILE)
    numbers = (1, round(4 * temperature), 0, limit.bit_length())
    names = made.named(ids, numbers, base=base_digest)
    prompt = predictor_pb2.Prompt(
        tenant=tenant,
        adapter=scope_name(name, base_digest),
        prompt_tokens=len(ids),
        max_tokens=limit,
        features=made.of(ids, numbers, base=base_digest).tolist(),
        feature_space=made.space,
    )
    explained = asyncio.run(_explained(layout.address("predictor"), prompt))
    moves = [(move.factor, _in_words(names.get(move.feature), words)) for move in explained.moves]
    if as_json:
        typer.echo(orjson.dumps(_document(explained, moves), option=orjson.OPT_INDENT_2).decode())
    else:
        _print(explained, moves)
    return 0


class PromptTokens(BaseModel):
    """What a gateway tells of a text"""

    model_config = ConfigDict(strict=True)
    tokens: list[Annotated[int, Field(ge=0, lt=1 << 32)]]
    token_strs: list[str | None]
    """None: the vocabulary has no such token."""
    max_model_len: Annotated[int, Field(lt=1 << 32)]


class ModelCard(BaseModel):
    model_config = ConfigDict(strict=True)
    parent: str | None
    tenant: str | None
    digest: str | None


def _card(client: httpx.Client, model: str) -> ModelCard:
    return ModelCard.model_validate(_asked(client, f"/v1/models/{quote(model)}"))


def full_name(card: ModelCard, said: str, adapters: Sequence[dict[str, Any]]) -> str:
    """As the gateway asks the predictor: namespace and name of the object, whatever its model name is, and no name for
    a base model. `adapters`: those of the status."""
    if card.tenant is None:
        return ""
    model = f"{card.tenant}/{said.rpartition(':')[2].rpartition('/')[2]}"
    found = [one for one in adapters if one["model"] == model]
    # Several pools may have one model name: then it is the one with these bytes.
    found.sort(key=lambda one: (one["certificate"] or {}).get("digest") != card.digest)
    return f"{found[0]['namespace']}/{found[0]['name']}" if found else model


def _asked(client: httpx.Client, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    answer = client.get(path) if body is None else client.post(path, json=body)
    if answer.status_code != httpx.codes.OK:
        raise SetupError(visible(message_of(answer)))
    return json_object(answer.content)


def _features(key_file: Path) -> PromptFeatures:
    if not key_file.is_file():
        raise SetupError(
            f"{key_file} is missing: without the gateway's key nobody knows what features mean. "
            f"Run this on the machine of the gateway, with its --data-dir and its {KEY_SETTING}, if it has one."
        )
    return PromptFeatures(read_key(key_file, named=f"{KEY_SETTING} or --data-dir"))


async def _explained(address: str, prompt: predictor_pb2.Prompt) -> predictor_pb2.ExplainEstimateResponse:
    request = predictor_pb2.ExplainEstimateRequest(prompt=prompt)
    try:
        async with GrpcNetwork().channel(address, "predictor") as channel:
            return await channel.call(EXPLAIN_ESTIMATE, request, seconds=EXPLAIN_SECONDS)
    except CallFailed as error:
        raise SetupError(
            f"no answer from the predictor ({error.details}). Is it running? See `motet status`."
        ) from error


def _in_words(name: FeatureName | None, words: dict[int, str | None]) -> str:
    if name is None:
        return "?"
    text = "".join(words.get(token) or f"<{token}>" for token in name.tokens).translate(_SPACES)
    return f"{name.kind} {text!r}" if name.tokens else name.kind


def _quantiles(estimate: common_pb2.Estimate) -> dict[str, int]:
    return {"q50": estimate.q50, "q80": estimate.q80, "q90": estimate.q90, "q95": estimate.q95}


def _document(explained: predictor_pb2.ExplainEstimateResponse, moves: list[tuple[float, str]]) -> dict[str, Any]:
    return {
        "version": explained.steps[-1].estimate.source.partition(":")[2],
        "answers": explained.answers,
        "trust": explained.trust,
        "features_known": explained.features_known,
        "steps": [{"what": step.what, **_quantiles(step.estimate)} for step in explained.steps],
        "moves": [{"factor": factor, "feature": text} for factor, text in moves],
    }


def _print(explained: predictor_pb2.ExplainEstimateResponse, moves: list[tuple[float, str]]) -> None:
    printer = Printer(width_of_a_pipe=200)
    document = _document(explained, moves)
    printer.line(f"Version {document['version']}; the adapter has {explained.answers} answers.")
    rows = [(step["what"], *(str(step[name]) for name in ("q50", "q80", "q90", "q95"))) for step in document["steps"]]
    printer.table(("estimated by", "q50", "q80", "q90", "q95"), rows)
    if not explained.features_known:
        printer.line("The prompt does not count: the weights were fitted to features of another key or version.")
    elif not moves:
        printer.line("Nothing in the prompt moved the estimate.")
    else:
        printer.line(f"The prompt decides {100 * explained.trust:.0f} % of it. The expected length, with and without:")
        printer.table(("factor", "feature"), [(f"{factor:.3f}", text) for factor, text in moves])
