"""The tokenizer of a base model, as transformers reads it."""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from motet.asset_fields import AssetFields
from motet.digest import PROCESSOR_TEMPLATE, asset_files

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def tokenizer_of(model: Path) -> Any:
    """None: the folder has no tokenizer, like the folder of a random model."""
    return read_tokenizer(model) if any((model / name).is_file() for name in TOKENIZER_FILES) else None


def read_tokenizer(model: Path) -> Any:
    """With the chat template that requests get. Raises what transformers raises, and ModelFolderError."""
    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True, trust_remote_code=False)
    if PROCESSOR_TEMPLATE in asset_files(model):  # a tokenizer alone does not read it
        tokenizer.chat_template = AssetFields(model).chat_template or tokenizer.chat_template
    return tokenizer
