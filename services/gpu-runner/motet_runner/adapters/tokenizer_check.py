"""Compares the tokenizer that an adapter's folder brings with the base model's, which is the one that is used. Called
where time and memory are bounded: all of it is a tenant's.

A training's tokenizer mostly is the base model's, saved again, perhaps with another padding or with a token for it. One
that makes other ids of a text was trained with other ids: the adapter would answer wrongly, without a sign of it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import orjson

from motet.adapter_template import token_text
from motet.errors import AdapterIncompatible
from motet_runner.adapters.chat_template import CONFIG, tokenizer_config
from motet_runner.adapters.strict_json import parse
from motet_runner.sources.file_selection import MAX_TEXT_BYTES, MAX_TOKENIZER_BYTES

TOKENIZER, ADDED = "tokenizer.json", "added_tokens.json"
MAX_TOKEN_CHARACTERS = 60
"""Of a token that a message shows"""
IN_TRAINING = ("dropout",)
CHANGE_IDS = ("normalizer", "pre_tokenizer", "post_processor")
FLAGS = ("single_word", "lstrip", "rstrip", "normalized")
"""What decides which texts an added token is found in"""


@dataclass(frozen=True, slots=True)
class _Outline:
    """What decides which ids a tokenizer gives."""

    ids: Mapping[str, int]
    """Of all its tokens"""
    added: Mapping[str, tuple[object, ...]]
    model: Mapping[str, Any]
    """Its options, and a digest of its merges"""
    others: Mapping[str, Any]


def check_tokenizer(folder: Path, base: Path | None, vocabulary: int) -> None:
    """`vocabulary`: the number of the base model's token ids; 0: not known. Raises AdapterIncompatible, which names the
    file and the field, if the adapter's tokenizer gives other ids than the base model's or ids that it does not have.
    Padding may differ: nothing is padded here."""
    files = [name for name in (TOKENIZER, ADDED, CONFIG) if (folder / name).is_file()]
    if not files or base is None or not (base / TOKENIZER).is_file():
        return
    config = tokenizer_config(folder)
    declared = [*_declared(folder, config)]
    own_file = folder / TOKENIZER
    alike = not own_file.is_file() or own_file.read_bytes() == (base / TOKENIZER).read_bytes()
    if alike and not declared:
        return
    pads = {token_text(config.get("pad_token")), *({} if alike else _pads(own_file))} - {""}
    try:
        of_base = _outline(base / TOKENIZER)
    except AdapterIncompatible:
        return  # no gateway can use it, either, and says so
    ids = _Ids(of_base.ids, max(vocabulary, 1 + max(of_base.ids.values(), default=-1)), pads)
    for place, token, number in declared:
        ids.check(place, token, number)
    if not alike:
        _compare(_outline(own_file), of_base, ids)


class _Ids:
    def __init__(self, of_base: Mapping[str, int], vocabulary: int, pads: set[str]) -> None:
        self._of_base = of_base
        self._vocabulary = vocabulary
        self.pads = pads

    def check(self, place: str, token: str, number: int) -> None:
        known = self._of_base.get(token)
        if known == number or (known is None and token in self.pads):
            return
        if number >= self._vocabulary:
            why = f"and the base model's vocabulary has {self._vocabulary} ids"
        elif known is not None:
            why = f"which has the id {known} in the base model's tokenizer"
        else:
            why = "which the base model's tokenizer does not have"
        raise _refused(f"{place}: {_shown(token)} has the id {number}, {why}")


def _compare(own: _Outline, base: _Outline, ids: _Ids) -> None:
    for token, number in sorted(own.ids.items(), key=lambda one: one[1]):
        ids.check(TOKENIZER, token, number)
    missing = next((one for one in base.ids if one not in own.ids and one not in ids.pads), None)
    if missing is not None:
        raise _refused(f"{TOKENIZER}: it lacks the base model's token {_shown(missing)}")
    for token, flags in own.added.items():
        if token not in ids.pads and base.added.get(token) != flags:
            raise _refused(f"{TOKENIZER}: added_tokens: {_shown(token)} is not found as in the base model's tokenizer")
    if lost := next((one for one in base.added if one not in own.added and one not in ids.pads), None):
        raise _refused(f"{TOKENIZER}: added_tokens: {_shown(lost)} is not found as in the base model's tokenizer")
    for name in sorted(own.model.keys() | base.model.keys()):
        if own.model.get(name) != base.model.get(name):
            raise _refused(f"{TOKENIZER}: model.{name} is not that of the base model's tokenizer")
    for name in CHANGE_IDS:
        if own.others[name] != base.others[name]:
            raise _refused(f"{TOKENIZER}: {name} is not that of the base model's tokenizer")


def _declared(folder: Path, config: Mapping[str, Any]) -> Iterator[tuple[str, str, int]]:
    """Place, text and id of each token that other files than tokenizer.json name"""
    decoder = config.get("added_tokens_decoder") or {}
    if not isinstance(decoder, dict) or not all(number.isascii() and number.isdigit() for number in decoder):
        raise _refused(f"{CONFIG}: added_tokens_decoder is no object of ids")
    for number, token in decoder.items():
        yield f"{CONFIG}: added_tokens_decoder", token_text(token), int(number[:12])
    if (folder / ADDED).is_file():
        with (folder / ADDED).open("rb") as file:
            added = parse(file.read(MAX_TEXT_BYTES), ADDED)
        if not isinstance(added, dict) or not all(type(number) is int for number in added.values()):
            raise _refused(f"{ADDED} is no object of tokens and their ids")
        for token, number in added.items():
            yield ADDED, token, number


def _pads(file: Path) -> set[str]:
    padding = _read(file).get("padding")
    return {token_text(padding.get("pad_token"))} if isinstance(padding, dict) else set()


def _read(file: Path) -> dict[str, Any]:
    with file.open("rb") as opened:
        raw = opened.read(MAX_TOKENIZER_BYTES + 1)
    try:
        content = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise _refused(f"{TOKENIZER} is not valid JSON: {str(error)[:200]}") from None
    return content if isinstance(content, dict) else {}


def _outline(file: Path) -> _Outline:
    """As one library writes it: versions of it name the same things in other ways."""
    from tokenizers import Tokenizer  # few adapters bring a tokenizer that differs

    try:
        tokenizer = Tokenizer.from_file(str(file))
        ids = tokenizer.get_vocab(with_added_tokens=True)
        content = orjson.loads(tokenizer.to_str())
    except MemoryError:
        raise
    except BaseException as error:  # the library raises bare Exceptions, and panics with its own
        raise _refused(f"{TOKENIZER} cannot be read: {str(error)[:200]}") from None
    del tokenizer
    model = {name: value for name, value in content["model"].items() if name not in ("vocab", *IN_TRAINING)}
    model["merges"] = sha256(orjson.dumps(model.get("merges"))).hexdigest()
    added = {one["content"]: tuple(one.get(flag) for flag in FLAGS) for one in content["added_tokens"]}
    return _Outline(ids, added, model, {name: content.get(name) for name in CHANGE_IDS})


def _shown(token: str) -> str:
    return ascii(token)[:MAX_TOKEN_CHARACTERS]


def _refused(why: str) -> AdapterIncompatible:
    return AdapterIncompatible(
        f"{why}. Motet tokenises with the base model's tokenizer. Train with that one, or remove the tokenizer's files "
        "from the adapter if it was not trained with them.",
        reason="TokenizerDiffers",
    )
