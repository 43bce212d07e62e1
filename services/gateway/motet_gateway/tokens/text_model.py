"""A model's tokenizer, chat template and sampling defaults, read from a folder of assets. No weights."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from tokenizers import Tokenizer

from motet.errors import Internal, InvalidRequest
from motet_gateway.tokens.render_pool import TemplateText
from motet_gateway.tokens.token_bytes import TokenBytes

ASSET_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "config.json",
)
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Defaults from the model's generation_config.json. The client's values override them."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelTokenizer:
    tokenizer: Tokenizer
    template: TemplateText | None
    vocabulary: int
    context_length: int
    """0 when config.json does not say."""
    eos_ids: frozenset[int] = frozenset()
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    token_bytes: TokenBytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_bytes", TokenBytes(self.tokenizer))

    @classmethod
    def from_folder(cls, folder: Path) -> Self:
        try:
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library raises bare Exceptions
            raise Internal(f"the model's tokenizer.json cannot be read: {error}") from None
        # A tokenizer saved from training may cut or fill every text to one length.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        config = _read_json(folder / "config.json")
        generation = _read_json(folder / "generation_config.json")
        tokenizer_config = _read_json(folder / "tokenizer_config.json")
        special = {name: _token_text(tokenizer_config.get(name)) for name in _SPECIAL_TOKENS}
        text = _template_text(folder, tokenizer_config)
        return cls(
            tokenizer,
            TemplateText(text, special) if text else None,
            tokenizer.get_vocab_size(with_added_tokens=True),
            int(config.get("max_position_embeddings") or config.get("n_positions") or 0),
            _ids(generation.get("eos_token_id", config.get("eos_token_id"))),
            _defaults(generation),
        )

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        # Always as a batch: only batch calls let other threads run meanwhile.
        encoded = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [one.ids for one in encoded]

    def decode(self, texts: Sequence[Sequence[int]], *, skip_special_tokens: bool = True) -> list[str]:
        decoded: list[str] = self.tokenizer.decode_batch(texts, skip_special_tokens=skip_special_tokens)
        return decoded

    def chat_template(self) -> TemplateText:
        if self.template is None:
            raise InvalidRequest(
                "this model has no chat template; send plain text to /v1/completions", param="messages"
            )
        return self.template


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise Internal(f"the model's {path.name} isn't valid JSON: {error}") from None
    return content if isinstance(content, dict) else {}


def _template_text(folder: Path, tokenizer_config: Mapping[str, Any]) -> str:
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text()
    inline = tokenizer_config.get("chat_template")
    if isinstance(inline, list):  # several templates, by name
        inline = {entry.get("name"): entry.get("template") for entry in inline}.get("default")
    return inline if isinstance(inline, str) else ""


def _token_text(token: Any) -> str:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def _ids(value: Any) -> frozenset[int]:
    return frozenset(value if isinstance(value, list) else [] if value is None else [value])


def _defaults(generation: Mapping[str, Any]) -> SamplingDefaults:
    names = SamplingDefaults.__dataclass_fields__
    return SamplingDefaults(**{name: generation[name] for name in names if generation.get(name) is not None})
