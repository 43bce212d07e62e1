"""Bodies drawn from the description of the API, and some that are spoiled: whatever comes, the gateway answers as
described, and never with a defect of its own."""

import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any

import pytest

from motet_gateway.lora_bodies import LOAD_PATH, UNLOAD_PATH
from motet_gateway.openapi.document import OPERATIONS
from testbed.fake_services import FakeServices
from tests.gateway.conftest import Served, serve
from tests.gateway.test_openapi import SCHEMAS, check, operation_of
from tests.support.for_each import for_each

BODIES = 20
HOSTILE: list[Any] = [
    *(None, True, False, 0, -1, 1.5, 2**63, 10**40, 1e308, "", " ", "\ud800", "\0", "x" * 3000),
    *([], {}, [[]], [None], {"": None}, {"type": "x"}, {"a": {"b": [1]}}, ["x"] * 200),
]
WORDS = ["fox", "Hello there", "a", "1", "{}", "tiny", "<think>", "naïve 🙂"]
POSTED = sorted(one.path for one in OPERATIONS if one.method == "post")


class Draw:
    """Values of a schema. One in `spoiled` is hostile instead."""

    def __init__(self, drawn: random.Random, spoiled: float) -> None:
        self._drawn, self._spoiled = drawn, spoiled

    def value(self, schema: Any, depth: int = 0) -> Any:
        drawn = self._drawn
        if schema is True or not schema or drawn.random() < self._spoiled:
            return drawn.choice(HOSTILE)
        if "$ref" in schema:
            return self.value(SCHEMAS[schema["$ref"].rpartition("/")[2]], depth)
        if kinds := schema.get("anyOf") or schema.get("oneOf"):
            return self.value(drawn.choice(kinds), depth)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return drawn.choice(schema["enum"])
        match schema.get("type"):
            case "object":
                return self._object(schema, depth)
            case "array":
                size = drawn.randint(schema.get("minItems", 0), max(schema.get("minItems", 0), min(3, 5 - depth)))
                return [self.value(schema.get("items", {}), depth + 1) for _ in range(size)]
            case "string":
                return "a" if "pattern" in schema else drawn.choice(WORDS)[: schema.get("maxLength")]
            case "integer":
                low = schema.get("minimum", 0)
                return drawn.choice([low, low + 1, min(schema.get("maximum", 20), 20)])
            case "number":
                return drawn.choice([0, 0.5, 1, schema.get("maximum", 2)])
            case "boolean":
                return drawn.random() < 0.5
        return None

    def _object(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        drawn, properties = self._drawn, schema.get("properties", {})
        some = {name for name in properties if drawn.random() < (0.15 if depth == 0 else 0.4)}
        made = {name: self.value(properties[name], depth + 1) for name in properties if name in some}
        for name in schema.get("required", ()):
            made.setdefault(name, self.value(properties.get(name, {}), depth + 1))
        if drawn.random() < 0.1:
            made["nobody_knows"] = drawn.choice(HOSTILE)
        return made


@pytest.fixture
async def quick(cluster: FakeServices) -> AsyncIterator[Served]:
    cluster.runners[0].tokens_per_step = 500
    async with serve(cluster) as served:
        yield served


@pytest.mark.parametrize("spoiled", [0.0, 0.08], ids=["as described", "spoiled"])
@for_each("path", POSTED)
async def test_every_answer_is_as_described(quick: Served, path: str, spoiled: float) -> None:
    schema = operation_of(path, "post")["requestBody"]["content"]["application/json"]["schema"]
    statuses: Counter[int] = Counter()
    for number in range(BODIES):
        drawn = random.Random(f"{path} {spoiled} {number}")
        body = Draw(drawn, spoiled).value(schema)
        if isinstance(body, dict) and drawn.random() < 0.95:
            body["model"] = drawn.choice(["tiny", "legal"])
        answer = await quick.http.post(
            path, content=json.dumps(body).encode(), headers={"content-type": "application/json"}
        )
        statuses[answer.status_code] += 1
        assert answer.status_code != HTTPStatus.INTERNAL_SERVER_ERROR, (body, answer.text)
        check(answer)
        assert "internal_error" not in answer.text, body
    of_right_ones = HTTPStatus.FORBIDDEN if path in {LOAD_PATH, UNLOAD_PATH} else HTTPStatus.OK  # not allowed here
    assert spoiled or statuses[of_right_ones], "some bodies are right"
