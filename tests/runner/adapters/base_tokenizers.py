"""Small tokenizers in the forms of well-known models', as these models' folders have them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{{ eos_token }}{% endfor %}"
_TEXTS = ["hello world, this is a text with words in it", "def f(x):\n    return x + 1  # it's 12345"]
_SPLIT = r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_BYTES = [f"<0x{number:02X}>" for number in range(256)]

Made = tuple[dict[str, Any], dict[str, Any]]
"""The content of tokenizer.json and of tokenizer_config.json"""


def _added(*tokens: str) -> list[AddedToken]:
    return [AddedToken(token, normalized=False, special=True) for token in tokens]


def _byte_level(*special: str) -> Tokenizer:
    made = Tokenizer(models.BPE())
    parts = [pre_tokenizers.Split(Regex(_SPLIT), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    made.pre_tokenizer = pre_tokenizers.Sequence(parts)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(_TEXTS, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet))
    made.add_special_tokens(_added(*special))
    made.decoder = decoders.ByteLevel()
    return made


def _piecewise(*special: str) -> Tokenizer:
    """As sentencepiece writes words, with a token for each byte"""
    made = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Replace(" ", "▁")
    alphabet = [*map(chr, range(33, 127)), "▁"]
    trainer = trainers.BpeTrainer(vocab_size=480, special_tokens=[*special, *_BYTES], initial_alphabet=alphabet)
    made.train_from_iterator(_TEXTS, trainer)
    content = json.loads(made.to_str())
    content["added_tokens"] = content["added_tokens"][: len(special)]
    made = Tokenizer.from_str(json.dumps(content))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence(parts)
    return made


def _begun(made: Tokenizer, token: str) -> processors.TemplateProcessing:
    number = made.token_to_id(token)
    return processors.TemplateProcessing(f"{token} $A", f"{token} $A {token}:1 $B:1", [(token, number)])


def _made(made: Tokenizer, tokenizer_class: str, *, model: dict[str, Any] | None = None, **config: Any) -> Made:
    content = json.loads(made.to_str())
    content["model"] |= model or {}
    flags = ("content", "lstrip", "rstrip", "normalized", "single_word", "special")
    decoder = {str(one["id"]): {flag: one[flag] for flag in flags} for one in content["added_tokens"]}
    said = {"tokenizer_class": tokenizer_class, "added_tokens_decoder": decoder, "chat_template": TEMPLATE}
    return content, said | {"clean_up_tokenization_spaces": False, "model_max_length": 4096} | config


def qwen() -> Made:
    made = _byte_level("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    made.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(_SPLIT), "isolated")
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_of])
    made.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    model = {"continuing_subword_prefix": "", "end_of_word_suffix": ""}
    config = {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"], "pad_token": "<|endoftext|>"}
    return _made(made, "Qwen2Tokenizer", model=model, bos_token=None, eos_token="<|im_end|>", **config)


def llama_2(*special: str) -> Made:
    made = _piecewise("<unk>", "<s>", "</s>", *special)
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.post_processor = _begun(made, "<s>")
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": None}
    return _made(made, "LlamaTokenizer", add_bos_token=True, add_eos_token=False, legacy=False, **tokens)


def phi_3() -> Made:
    """The words of Llama 2, and more special tokens, which take the blanks after them"""
    content, config = llama_2("<|user|>", "<|end|>", "<|assistant|>")
    for one in content["added_tokens"][3:]:
        one["rstrip"] = config["added_tokens_decoder"][str(one["id"])]["rstrip"] = True
    return content, config | {"eos_token": "<|end|>", "chat_template": TEMPLATE.replace("im_start", "user")}


def llama_3() -> Made:
    made = _byte_level("<|begin_of_text|>", "<|im_start|>", "<|eot_id|>")
    parts = [processors.ByteLevel(trim_offsets=False), _begun(made, "<|begin_of_text|>")]
    made.post_processor = processors.Sequence(parts)
    tokens = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
    return _made(made, "PreTrainedTokenizerFast", model={"ignore_merges": True}, **tokens)


def gpt_2() -> Made:
    made = _byte_level("<|endoftext|>")
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.post_processor = processors.ByteLevel(trim_offsets=False)
    model = {"continuing_subword_prefix": "", "end_of_word_suffix": ""}
    tokens = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
    return _made(made, "GPT2Tokenizer", model=model, add_prefix_space=False, **tokens)


def gemma() -> Made:
    made = _piecewise("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>")
    made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    made.post_processor = _begun(made, "<bos>")
    tokens = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"}
    content, config = _made(made, "GemmaTokenizer", add_bos_token=True, add_eos_token=False, **tokens)
    content["added_tokens"][4]["special"] = config["added_tokens_decoder"]["4"]["special"] = False
    return content, config


FORMS: dict[str, tuple[Callable[[], Made], str]] = {
    "qwen": (qwen, "qwen2"),
    "llama-2": (llama_2, "llama"),
    "phi-3": (phi_3, "phi3"),
    "llama-3": (llama_3, "llama"),
    "gpt-2": (gpt_2, "gpt2"),
    "gemma": (gemma, "gemma"),
}


def write_base(folder: Path, form: str) -> Path:
    made, model_type = FORMS[form]
    content, config = made()
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, "vocab_size": 1024}))
    return folder
