"""The text model inside a model of text and images: its config, and the names of its weights.

Motet serves no images. So only the text model is made, and of the files only its weights are read: the same model as
one of text alone. A pair of wrapper and text model is listed once a test has compared it with transformers.
"""

from pathlib import Path
from typing import Any

import transformers

from motet.errors import ModelFolderError
from motet_runner.execute.load.checkpoint_headers import Checkpoint
from motet_runner.supported_models import stored_dtype

TEXT_MODELS = {
    "gemma3": frozenset({"gemma3_text"}),
    "internvl": frozenset({"qwen2"}),
    "llava": frozenset({"llama", "mistral"}),
    "llava_next": frozenset({"llama", "mistral"}),
    "llava_onevision": frozenset({"qwen2"}),
    "mistral3": frozenset({"mistral"}),
    "qwen2_5_vl": frozenset({"qwen2_5_vl_text"}),
    "qwen2_vl": frozenset({"qwen2_vl_text"}),
    "qwen3_vl": frozenset({"qwen3_vl_text"}),
}
"""`model_type` of the wrapper → those of its text model"""

OF_TEXT_ALONE = {"qwen2_5_vl_text": "qwen2", "qwen2_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
"""Text models of which transformers has no form without images, and the `model_type` of the model that computes the
same for text: there, the three positions of a token (time, height, width) are equal."""

OF_THREE_POSITIONS = frozenset({"mrope_section", "mrope_interleaved"})
"""Rope parameters that share out the frequencies among the three positions"""

ROOTS = (("model.language_model.", "model."), ("language_model.", ""))
"""How a text model's names begin in files of wrappers, now and in earlier versions of transformers, and in its own"""

PLAIN = ("model.embed_tokens.", "model.layers.", "model.norm.", "lm_head.")
"""How they begin in files that name the text model as if it were alone"""


def text_config(folder: Path) -> Any:
    """The model's config, or its text model's. Raises what transformers raises, and ModelFolderError for a model of
    text and images that Motet does not serve."""
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    kinds = TEXT_MODELS.get(config.model_type)
    text = config.get_text_config(decoder=True)
    if kinds is None:
        if text is config or type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
            return config
        raise _not_served(config, text)
    if text.model_type not in kinds:
        raise _not_served(config, text)
    if text.model_type in OF_TEXT_ALONE:
        text = _of_text_alone(text)
    text.tie_word_embeddings = config.tie_word_embeddings  # the wrapper has the output layer
    if (ends := getattr(config, "eos_token_id", None)) is not None:  # 0 is one, too
        text.eos_token_id = ends
    return text


def checkpoint_of(folder: Path, raw: dict[str, Any]) -> Checkpoint:
    """The weights that `text_config` asks for. `raw`: the folder's config.json"""
    wrapped = raw.get("model_type") in TEXT_MODELS
    return Checkpoint(folder, stored_dtype(raw), name_in_model=name_in_text_model if wrapped else None)


def name_in_text_model(name: str) -> str | None:
    """A tensor's name in the text model; None: it is of another part, such as the one that sees images."""
    for root, own in ROOTS:
        if name.startswith(root):
            return own + name.removeprefix(root)
    return name if name.startswith(PLAIN) else None


def _of_text_alone(text: Any) -> Any:
    fields = text.to_dict()
    kind = OF_TEXT_ALONE[fields.pop("model_type")]
    rope = fields.get("rope_parameters") or {}
    fields["rope_parameters"] = {name: one for name, one in rope.items() if name not in OF_THREE_POSITIONS}
    return transformers.AutoConfig.for_model(kind, **fields)


def _not_served(config: Any, text: Any) -> ModelFolderError:
    served = "; ".join(f"{kind} around {' or '.join(sorted(texts))}" for kind, texts in TEXT_MODELS.items())
    return ModelFolderError(
        f"not yet: config.json has model_type {config.model_type!r} around a text model {text.model_type!r}. Of models "
        f"that read more than text, Motet serves the text of: {served}."
    )
