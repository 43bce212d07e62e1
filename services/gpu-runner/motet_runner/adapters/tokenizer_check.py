"""Compares the tokenizer that an adapter's folder brings with the base model's, which is the one that is used. Called
where time and memory are bounded: all of it is a tenant's.

A training's tokenizer mostly is the base model's, saved again, perhaps with another padding or with a token for it. One
that makes other ids of a text was trained with other ids: the adapter would answer wrongly, without a sign of it. A
library that saves a tokenizer writes its parts in other ways than it has read them. So the tokens are compared by their
ids, and all else by the ids of texts.
"""

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from motet.adapter_template import token_text
from motet.errors import AdapterIncompatible
from motet_runner.adapters.chat_template import CONFIG, tokenizer_config
from motet_runner.adapters.strict_json import parse
from motet_runner.adapters.tokenizer_texts import Ids, ids_of, ordinary_texts, rare_texts
from motet_runner.sources.file_selection import MAX_TEXT_BYTES, MAX_TOKENIZER_BYTES

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER, ADDED = "tokenizer.json", "added_tokens.json"
MAX_TOKEN_CHARACTERS = 60
"""Of a token or a text that a message shows"""
MAX_FIELDS = 3
"""Of those that a message names"""
UNUSED = ("pad_token", "mask_token")
"""The tokens that no text has"""
CHANGE_IDS = ("normalizer", "pre_tokenizer")
FLAGS = ("single_word", "lstrip", "rstrip", "normalized")
"""What decides which texts an added token is found in"""
CHANGE_NO_IDS = ("trim_offsets", "dropout")
SAMPLE = "Hello, world!"


@dataclass(frozen=True, slots=True)
class _Outline:
    ids: Mapping[str, int]
    """Of all its tokens"""
    added: Mapping[str, tuple[object, ...]]
    fields: Mapping[str, Any]
    """What else decides which ids it gives, as the library writes it"""


@dataclass(frozen=True, slots=True)
class _Base:
    outline: _Outline
    declared: AbstractSet[tuple[str, int]]
    """The tokens and ids that its other files name"""
    untold: AbstractSet[str]
    """The tokens of which its tokenizer may know nothing"""
    ordinary: Mapping[str, Ids]
    rare: Mapping[str, Ids]
    begun: Ids
    """Of `SAMPLE`, with the special tokens that are added to a text"""


def check_tokenizer(folder: Path, base: Path | None, vocabulary: int) -> tuple[str, ...]:
    """What differs without making other ids of an ordinary text, for a person. `vocabulary`: the number of the base
    model's token ids; 0: not known. Raises AdapterIncompatible, which names the file and the field, if the adapter's
    tokenizer gives other ids than the base model's or ids that it does not have. Padding may differ: nothing is padded
    here."""
    files = [name for name in (TOKENIZER, ADDED, CONFIG) if (folder / name).is_file()]
    if not files or base is None or not (base / TOKENIZER).is_file():
        return ()
    config = tokenizer_config(folder)
    declared = [*_declared(folder, config)]
    own_file = folder / TOKENIZER
    alike = not own_file.is_file() or own_file.read_bytes() == (base / TOKENIZER).read_bytes()
    if alike and not declared:
        return ()
    unused = {*(token_text(config.get(name)) for name in UNUSED), *({} if alike else _pads(own_file))} - {""}
    try:
        of_base = _base(base, unused)
    except AdapterIncompatible:
        return ()  # no gateway can use it, either, and says so
    ids = _Ids(of_base, vocabulary, unused)
    for place, token, number in declared:
        ids.check(place, token, number)
    if alike:
        return ()
    with _readable():
        tokenizer = _loaded(own_file)
        own = _outline(tokenizer)
    return _compare(tokenizer, own, of_base, ids)


class _Ids:
    def __init__(self, base: _Base, vocabulary: int, unused: set[str]) -> None:
        self._of_base = base.outline.ids
        self._declared = base.declared
        self._vocabulary = max(vocabulary, 1 + max(self._of_base.values(), default=-1))
        self._unused = unused

    def check(self, place: str, token: str, number: int) -> None:
        known = self._of_base.get(token)
        if known == number or (token, number) in self._declared or (known is None and token in self._unused):
            return
        if number >= self._vocabulary:
            why = f"and the base model's vocabulary has {self._vocabulary} ids"
        elif known is not None:
            why = f"which has the id {known} in the base model's tokenizer"
        else:
            why = "which the base model's tokenizer does not have"
        raise _refused(f"{place}: {_shown(token)} has the id {number}, {why}")


def _compare(tokenizer: "Tokenizer", own: _Outline, base: _Base, ids: _Ids) -> tuple[str, ...]:
    of_base = base.outline
    for token, number in sorted(own.ids.items(), key=lambda one: one[1]):
        ids.check(TOKENIZER, token, number)
    missing = next((one for one in of_base.ids if one not in own.ids and one not in base.untold), None)
    if missing is not None:
        raise _refused(f"{TOKENIZER}: it lacks the base model's token {_shown(missing)}")
    for token in (*own.added, *of_base.added):
        if token not in base.untold and own.added.get(token) != of_base.added.get(token):
            raise _refused(f"{TOKENIZER}: added_tokens: {_shown(token)} is not found as in the base model's tokenizer")
    names = sorted(own.fields.keys() | of_base.fields.keys())
    unlike = [name for name in names if own.fields.get(name) != of_base.fields.get(name)]
    differ = f"{', '.join(unlike[:MAX_FIELDS]) or 'added_tokens'} {'are not those' if unlike[1:] else 'is not that'}"
    if text := _given_other_ids(tokenizer, base.ordinary):
        raise _refused(f"{TOKENIZER}: {differ} of the base model's tokenizer, and {_shown(text)} has other ids")
    rare = _given_other_ids(tokenizer, base.rare)
    warnings = []
    if unlike or rare:
        same = f"{len(base.ordinary)} sample texts have the same ids" + (f", {_shown(rare)} has not" if rare else "")
        warnings.append(f"{TOKENIZER}: {differ} of the base model's tokenizer, which is used: {same}")
    if ids_of(tokenizer, SAMPLE, special_tokens=True) != base.begun:
        warnings.append(f"{TOKENIZER}: post_processor adds other tokens than the base model's tokenizer, which is used")
    return tuple(warnings)


def _given_other_ids(tokenizer: "Tokenizer", texts: Mapping[str, Ids]) -> str:
    """The first such text; empty: there is none"""
    return next((text for text, ids in texts.items() if ids_of(tokenizer, text) != ids), "")


def _base(folder: Path, unused: set[str]) -> _Base:
    try:
        declared = {(token, number) for _, token, number in _declared(folder, tokenizer_config(folder))}
    except AdapterIncompatible:  # its pool says so, if that counts
        declared = set()
    ordinary: dict[str, Ids] = {}
    with _readable():
        tokenizer = _loaded(folder / TOKENIZER)
        outline = _outline(tokenizer)
        untold = unused | {token for token, _ in declared if token not in outline.ids}
        added = {outline.ids[token]: token for token in outline.added if token not in untold}
        rare = {text: ids_of(tokenizer, text) for text in rare_texts([*added.values()])}
        for text in ordinary_texts(tokenizer, [*added.values()]):
            ids = ids_of(tokenizer, text)
            if not any(token in text for token in untold):
                (rare if _is_beside(text, ids, added) else ordinary)[text] = ids
        begun = ids_of(tokenizer, SAMPLE, special_tokens=True)
    return _Base(outline, declared, untold, ordinary, rare, begun)


def _is_beside(text: str, ids: Ids, added: Mapping[int, str]) -> bool:
    """Whether the text has an added token and more"""
    found = (added[number] for number in ids or () if number in added)
    return any(token in text and token != text for token in found)


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


@contextmanager
def _readable() -> Iterator[None]:
    try:
        yield
    except MemoryError:
        raise
    except BaseException as error:  # the library raises bare Exceptions, and panics with its own
        raise _refused(f"{TOKENIZER} cannot be read: {str(error)[:200]}") from None


def _loaded(file: Path) -> "Tokenizer":
    from tokenizers import Tokenizer  # few adapters bring a tokenizer that differs

    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    if getattr(tokenizer.model, "dropout", None) is not None:  # in training only
        tokenizer.model.dropout = None
    return tokenizer


def _outline(tokenizer: "Tokenizer") -> _Outline:
    """As one library writes it: versions of it name the same things in other ways."""
    content = orjson.loads(tokenizer.to_str())
    model = content["model"]
    if isinstance(model["vocab"], dict):
        del model["vocab"]  # the ids say it
    for name in ("vocab", "merges"):
        model[name] = sha256(orjson.dumps(model.get(name))).hexdigest()
    fields = {f"model.{name}": value for name, value in _essence(model).items()}
    fields |= {name: _essence(content.get(name)) for name in CHANGE_IDS}
    added = {one["content"]: tuple(one.get(flag) for flag in FLAGS) for one in content["added_tokens"]}
    return _Outline(tokenizer.get_vocab(with_added_tokens=True), added, fields)


def _essence(value: Any) -> Any:
    """Without what changes no id, and without what is written in one case and left out in another"""
    if isinstance(value, dict):
        kept = {name: _essence(one) for name, one in value.items() if name not in CHANGE_NO_IDS}
        return {name: one for name, one in kept.items() if one not in (None, "")}
    return [_essence(one) for one in value] if isinstance(value, list) else value


def _shown(token: str) -> str:
    shown = ascii(token)
    return shown if len(shown) <= MAX_TOKEN_CHARACTERS else f"{shown[: MAX_TOKEN_CHARACTERS - 1]}…"


def _refused(why: str) -> AdapterIncompatible:
    return AdapterIncompatible(
        f"{why}. Motet tokenises with the base model's tokenizer. Train with that one, or remove the tokenizer's files "
        "from the adapter if it was not trained with them.",
        reason="TokenizerDiffers",
    )
