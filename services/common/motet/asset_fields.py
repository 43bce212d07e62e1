"""Reads the JSON and text files among a model's assets. A runner reads them before it serves the model, so that its
pool says what is wrong; a gateway reads them again before it uses them.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from motet.adapter_template import declared_template
from motet.digest import PROCESSOR_TEMPLATE, asset_files
from motet.errors import InvalidRequest, ModelFolderError
from motet.sampling import OPTIONS

MOST = 1 << 31


class AssetFields:
    """Raises ModelFolderError that names the file and the field."""

    def __init__(self, folder: Path) -> None:
        config, self.generation = _object(folder, "config.json"), _object(folder, "generation_config.json")
        self.tokenizer = _object(folder, "tokenizer_config.json")
        said = {name: self.generation.get(name) for name, option in OPTIONS.items() if option.of_model}
        try:
            self.sampling = {name: OPTIONS[name].check(name, one) for name, one in said.items() if one is not None}
        except InvalidRequest as error:
            raise _wrong("generation_config.json:", error.message.removesuffix(".")) from None
        # A model of text and images says it of the text model inside.
        of_text = config.get("text_config")
        configs = (config, of_text) if isinstance(of_text, dict) else (config,)
        self.context_length = next(
            (length for one in configs for name in _LENGTHS if (length := _length(one, name))), 0
        )
        said_ends = [_ids(self.generation, "generation_config.json"), *(_ids(one, "config.json") for one in configs)]
        self.eos_ids = next((ids for ids in said_ends if ids is not None), frozenset())
        self.chat_template = _template(folder, self.tokenizer)


_LENGTHS = ("max_position_embeddings", "n_positions")


def check_asset_files(folder: Path) -> None:
    AssetFields(folder)
    _object(folder, "tokenizer.json")


def _wrong(field: str, what: str) -> ModelFolderError:
    return ModelFolderError(f"The model's {field} {what}. Correct the file in the model's folder, then start again.")


def _object(folder: Path, name: str) -> dict[str, Any]:
    try:
        content = json.loads(_text(folder / name))
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise _wrong(name, f"is not valid JSON ({error})") from None
    if not isinstance(content, dict):
        raise _wrong(name, "must be a JSON object")
    for field, value in content.items():
        try:
            json.dumps({field: value}, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise _wrong(f"{name}: {field!a}", "holds half of a surrogate pair") from None
    return content


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise _wrong(path.name, f"is not UTF-8: see byte {error.start}") from None


def _number(value: Any, field: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or abs(value) > MOST:
        raise _wrong(field, f"must be a number, not {_shown(value)}")
    return value


def _length(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if value is None:
        return 0
    return int(_number(value, f"config.json: {name}"))


def _ids(content: Mapping[str, Any], file: str) -> frozenset[int] | None:
    value = content.get("eos_token_id")
    if value is None:
        return None
    ids = value if isinstance(value, list) else [value]
    for one in ids:
        if isinstance(one, bool) or not isinstance(one, int) or abs(one) > MOST:
            raise _wrong(f"{file}: eos_token_id", f"must be a token id or a list of them, not {_shown(value)}")
    return frozenset(ids)


def _template(folder: Path, tokenizer: Mapping[str, Any]) -> str:
    """Of several, the one that transformers takes: a processor's first, then the tokenizer's."""
    of_processor = _object(folder, PROCESSOR_TEMPLATE) if PROCESSOR_TEMPLATE in asset_files(folder) else {}
    if (text := of_processor.get("chat_template")) is not None:
        if not isinstance(text, str):
            raise _wrong(f"{PROCESSOR_TEMPLATE}: chat_template", f"must be text, not {_shown(text)}")
        return text
    try:
        jinja = _text(folder / "chat_template.jinja")
    except FileNotFoundError:
        jinja = None
    try:
        return declared_template(jinja, tokenizer.get("chat_template"))
    except ValueError as error:
        raise _wrong("tokenizer_config.json: chat_template", str(error)) from None


def _shown(value: Any) -> str:
    return ascii(value)[:80]
