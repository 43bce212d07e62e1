"""Refuses unsupported models by their config.json, without waiting seconds for the engine to load."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from motet.errors import ModelFolderError

PER_CALL_ROPE = ("dynamic", "longrope")
"""Rope types whose frequencies depend on the longest position of a call: one long request would change the answers of
other requests in its batch. `execute.load.length_rope` computes these ropes per sequence."""

ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention"})


def read_supported_config(folder: Path, *, with_vllm: bool = False) -> dict[str, Any]:
    """The model's configuration. Raises ModelFolderError if Motet cannot serve a model with this configuration.
    `with_vllm`: with vLLM as the engine, which says itself which quantised weights it loads."""
    path = folder / "config.json"
    if not path.is_file():
        raise ModelFolderError(f"{folder} has no config.json. spec.model.uri must name a Hugging Face model folder.")
    try:
        raw = json.loads(path.read_text())
    except ValueError as error:
        raise ModelFolderError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ModelFolderError(f"{path} must contain a JSON object.")
    _refuse(raw, with_vllm=with_vllm)
    return raw


def _refuse(raw: dict[str, Any], *, with_vllm: bool) -> None:
    name = (raw.get("architectures") or [raw.get("model_type", "this model")])[0]
    text = raw.get("text_config") or raw
    if raw.get("is_encoder_decoder"):
        raise ModelFolderError(f"{name} is an encoder-decoder. Motet serves only decoders.")
    if not isinstance(text, dict):
        raise ModelFolderError(f"{name}: text_config in config.json must be a JSON object.")
    quantised = raw.get("quantization_config") or text.get("quantization_config")
    if quantised and not isinstance(quantised, dict):
        raise ModelFolderError(f"{name}: quantization_config in config.json must be a JSON object.")
    if quantised and not with_vllm:
        method = quantised.get("quant_method", "unknown")
        raise ModelFolderError(
            f"{name} is quantised ({method}), which Motet's own engine does not serve yet. Use the unquantised "
            "weights, or a pool whose engine.backend is vllm."
        )
    layers = set(text.get("layer_types") or ()) - ATTENTION_LAYERS
    if layers:
        kinds = ", ".join(sorted(layers))
        raise ModelFolderError(
            f"{name} has layers that are not plain attention ({kinds}), which Motet does not serve yet."
        )
    if text.get("attention_chunk_size"):
        raise ModelFolderError(f"{name} attends in chunks (attention_chunk_size), which Motet does not serve yet.")


def ropes_of(text: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The model's rope parameters; several if kinds of layers have different ropes"""
    for field in ("rope_parameters", "rope_scaling"):
        rope = text.get(field)
        if isinstance(rope, dict):
            yield rope
            yield from (inner for inner in rope.values() if isinstance(inner, dict))


def stored_dtype(raw: dict[str, Any]) -> str | None:
    """The type of the weights that config.json says, for the model or for the text model inside it"""
    for config in (raw, raw.get("text_config")):
        if isinstance(config, dict) and (found := config.get("dtype") or config.get("torch_dtype")):
            return str(found)
    return None


def eos_token_ids(folder: Path, of_config: Any) -> tuple[int, ...]:
    """Of generation_config.json, else those of config.json. A chat model often has its EOS tokens only in the first."""
    path = folder / "generation_config.json"
    eos = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
    if eos is None:
        eos = of_config
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (eos,)
