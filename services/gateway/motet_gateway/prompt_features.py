"""Makes features of a prompt's token ids, from which the predictor estimates the length of the answer. Pure.

Features are keyed hashes (SipHash-1-3): of single tokens and of pairs at the prompt's start and end, of its first and
last few tokens together, and of the request's numbers. The key is not in the database. So who reads the samples there
cannot look tokens up by hashing a vocabulary. The base model is hashed, too: a token of another one is another word."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import log2

import numpy as np

VERSION = 3
"""Change it when the same prompt would give other features."""
EDGE_TOKENS = 128
"""How many tokens at either end are looked at. It bounds the time that a prompt takes."""
MAX_FEATURES = 280
"""It bounds messages and samples. Of a long prompt, pairs in the middle are left out."""
FEATURE_MASK = 0xFFFFFF
"""A feature has 24 bits. The table of weights has fewer rows, so more bits would tell no two features apart."""
OPENING_TOKENS = 4

_Words = np.ndarray[tuple[int], np.dtype[np.uint64]]
Features = np.ndarray[tuple[int], np.dtype[np.uint32]]

_TOKEN, _PAIR, _OPENING, _LAST, _LAST_PAIR, _NUMBER = (kind << 58 for kind in range(1, 7))
_CONSTANTS = (0x736F6D6570736575, 0x646F72616E646F6D, 0x6C7967656E657261, 0x7465646279746573)
_END, _MASK = np.uint64(0xFF), np.uint64(FEATURE_MASK)
_BITS = np.repeat(np.array(((13, 16), (21, 17)), np.uint64)[:, :, None], MAX_FEATURES, axis=2)
"""Of each word: to shift words by as many numbers takes a third of the time of shifting all by one number."""
_HALVES = [(bits, 64 - bits) for bits in _BITS]
_SWAP = np.full(MAX_FEATURES, 32, np.uint64)
_FIRST = np.ones(1, bool)


class PromptFeatures:
    def __init__(self, key: bytes) -> None:
        digest = hashlib.blake2b(key, digest_size=20, salt=VERSION.to_bytes(16, "little"), person=b"prompt features")
        halves = [int.from_bytes(digest.digest()[at : at + 8], "little") for at in (0, 8, 0, 8)]
        state = np.array(_CONSTANTS, np.uint64) ^ np.array(halves, np.uint64)
        self._state = state[0::2, None], state[1::2, None]
        self.space = int.from_bytes(digest.digest()[16:], "little") | 1
        """Names the version and the key: features of two spaces have nothing in common. Never 0."""

    def of(self, ids: Sequence[int], numbers: Sequence[int] = (), *, base: str = "") -> Features:
        """The features of a prompt to a base model (its digest), each once. `numbers` are those of the request, each
        of a few dozen values."""
        return _each_once(self._hashed(_words_of(ids, numbers) ^ _salt(base)))

    def named(self, ids: Sequence[int], numbers: Sequence[int] = (), *, base: str = "") -> dict[int, "FeatureName"]:
        """What each feature of a prompt stands for, for people."""
        words = _words_of(ids, numbers)
        return {
            feature: _name_of(word, ids)
            for feature, word in zip(self._hashed(words ^ _salt(base)).tolist(), words.tolist(), strict=True)
        }

    def _hashed(self, words: _Words) -> Features:
        """Some bits of the SipHash-1-3 of each word. All have one length, so that it is not hashed."""
        mixed = _Mixed(self._state, len(words))
        mixed.right[1] ^= words
        mixed.round()
        mixed.left[0] ^= words
        mixed.left[1] ^= _END
        for _ in range(3):
            mixed.round()
        both = mixed.left ^ mixed.right
        hashed: Features = ((both[0] ^ both[1]) & _MASK).astype(np.uint32)
        return hashed


@lru_cache(maxsize=256)
def _salt(base: str) -> np.uint64:
    return np.uint64(int.from_bytes(hashlib.blake2b(base.encode(), digest_size=8).digest(), "little"))


@dataclass(frozen=True, slots=True)
class FeatureName:
    kind: str
    tokens: tuple[int, ...] = ()


def _words_of(ids: Sequence[int], numbers: Sequence[int]) -> _Words:
    edges = ids if len(ids) <= 2 * EDGE_TOKENS else [*ids[:EDGE_TOKENS], *ids[-EDGE_TOKENS:]]
    tokens = np.array(edges, dtype=np.uint64)
    lengths = len(ids).bit_length(), int(4 * log2(len(ids) + 1))
    single = [_NUMBER | at << 32 | number for at, number in enumerate((*lengths, *numbers))]
    joined = 0
    for at, token in enumerate(ids[:OPENING_TOKENS]):
        joined = (joined * 1_000_003 + token + 1) & 0xFFFF_FFFF_FFFF
        single.append(_OPENING | at << 48 | joined)
    if len(ids) > 1:
        single += (_LAST | ids[-1], _LAST_PAIR | ids[-1] << 24 | ids[-2])
    words = np.concatenate((np.array(single, np.uint64), _each_once(tokens) | np.uint64(_TOKEN)))
    pairs = tokens[1:] << np.uint64(24)
    pairs |= tokens[:-1]
    pairs |= np.uint64(_PAIR)
    room = max(0, MAX_FEATURES - len(words)) // 2
    if len(pairs) > 2 * room:
        pairs = np.concatenate((pairs[:room], pairs[len(pairs) - room :]))
    return np.concatenate((words, pairs))[:MAX_FEATURES]


_NUMBERS = ("length of the prompt", "length of the prompt, finer", "turns", "temperature", "stop texts", "max_tokens")


def _name_of(word: int, ids: Sequence[int]) -> FeatureName:
    kind, low, high = word >> 58 << 58, word & 0xFFFFFF, word >> 24 & 0xFFFFFF
    if kind == _NUMBER:
        at = word >> 32 & 0xFFFFFF
        return FeatureName(_NUMBERS[at] if at < len(_NUMBERS) else "number of the request")
    if kind == _OPENING:
        return FeatureName("opening", tuple(ids[: (word >> 48 & 0x3FF) + 1]))
    if kind == _LAST:
        return FeatureName("last token", (low,))
    if kind == _LAST_PAIR:
        return FeatureName("last tokens", (low, high))
    return FeatureName("token", (low,)) if kind == _TOKEN else FeatureName("pair", (low, high))


class _Mixed:
    """The state of SipHash for some words. Its first and third part are mixed with the second and the fourth in the
    same way, so one operation does it for both: most of the time of an operation does not depend on the size."""

    def __init__(self, state: tuple[_Words, _Words], words: int) -> None:
        self.left, self.right, self._high = (np.empty((2, words), np.uint64) for _ in range(3))
        self.left[:], self.right[:] = state
        # Copies, as two rows in one piece are shifted in one loop.
        self._halves = [(bits[:, :words].copy(), rest[:, :words].copy()) for bits, rest in _HALVES]
        self._swap = _SWAP[:words]

    def round(self) -> None:
        for at, (bits, rest) in enumerate(self._halves):
            self.left += self.right
            _rotate(self.right, bits, rest, self._high)
            self.right ^= self.left
            _rotate(self.left[at], self._swap, self._swap, self._high[0])
            self.right = self.right[::-1].copy()  # now the other one of its parts is mixed with the first


def _rotate(words: np.ndarray, bits: np.ndarray, rest: np.ndarray, high: np.ndarray) -> None:
    """Each word by its bits; `rest` are the others of its 64."""
    np.left_shift(words, bits, out=high)
    np.right_shift(words, rest, out=words)
    words |= high


def _each_once(words: np.ndarray) -> np.ndarray:
    """In order. Several times faster than numpy.unique for some hundred."""
    ordered = np.sort(words)
    new: np.ndarray = ordered[np.concatenate((_FIRST[: len(ordered)], ordered[1:] != ordered[:-1]))]
    return new
