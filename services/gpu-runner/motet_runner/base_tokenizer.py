"""The tokenizer of a base model, as transformers reads it."""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def tokenizer_of(model: Path) -> Any:
    """None: the folder has no tokenizer, like the folder of a random model."""
    if not any((model / name).is_file() for name in TOKENIZER_FILES):
        return None
    return AutoTokenizer.from_pretrained(model, local_files_only=True, trust_remote_code=False)
