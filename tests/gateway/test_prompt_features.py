"""What the gateway tells the predictor about a prompt, and the key by which it is hashed."""

import asyncio
from array import array
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.errors import SetupError
from motet_gateway.features_key import KEY_BYTES, MAX_KEY_BYTES, read_key
from motet_gateway.prompt_features import EDGE_TOKENS, MAX_FEATURES, Features, PromptFeatures
from motet_predictor import sample_features
from tests.gateway.conftest import Served

KEY = bytes(range(32))
SPACE, OF_5_6_7 = (
    1332441749,
    [
        452134,
        1085072,
        1553686,
        2441294,
        3368295,
        6796992,
        7437655,
        8337119,
        9737218,
        10520846,
        11880503,
        13638211,
        15351191,
    ],
)
ids = st.lists(st.integers(0, 2**24 - 1), max_size=3 * EDGE_TOKENS)


@given(ids, st.lists(st.integers(0, 63), max_size=4))
def test_features_are_bounded_each_once_and_the_same_for_lists_and_arrays(
    prompt: list[int], numbers: list[int]
) -> None:
    made = PromptFeatures(KEY).of(prompt, numbers).tolist()
    assert len(set(made)) == len(made) <= MAX_FEATURES <= sample_features.MAX_FEATURES
    assert made == PromptFeatures(KEY).of(array("I", prompt), numbers).tolist()


def test_features_stay_the_same_from_version_to_version() -> None:
    """Otherwise learned weights mean nothing. Who changes this changes VERSION."""
    made = PromptFeatures(KEY)
    assert made.space == SPACE
    assert made.of([5, 6, 7], [1]).tolist() == OF_5_6_7


def test_prompts_with_the_same_start_and_end_have_common_features() -> None:
    made = PromptFeatures(KEY)
    one, other = set(made.of([1, 2, 3, 4, 5, 6]).tolist()), set(made.of([1, 2, 3, 4, 9, 6]).tolist())
    assert len(one & other) > len(one) / 2
    assert one != other
    assert made.of([1, 2]).tolist() != made.of([2, 1]).tolist()
    assert made.of([1, 2], [0, 1]).tolist() != made.of([1, 2], [1, 0]).tolist()


@pytest.mark.parametrize("at", [2, 100, -100, -2])
def test_of_a_long_prompt_each_token_near_an_end_counts(at: int) -> None:
    prompt = list(range(1000))
    other = prompt.copy()
    other[at] = 5000
    made = PromptFeatures(KEY)
    assert made.of(prompt).tolist() != made.of(other).tolist()


def test_another_key_has_another_space_and_other_features() -> None:
    one, other = PromptFeatures(KEY), PromptFeatures(KEY[::-1])
    assert one.space != other.space
    assert not set(one.of([1, 2, 3]).tolist()) & set(other.of([1, 2, 3]).tolist())


def test_two_base_models_share_no_features() -> None:
    """Their token ids stand for different words."""
    made, prompt = PromptFeatures(KEY), list(range(40))
    one, other = (made.of(prompt, [1], base=f"sha256:{number}").tolist() for number in "12")
    assert len(one) == len(other)
    assert not set(one) & set(other)
    assert set(made.named(prompt, [1], base="sha256:1")) == set(one)


def test_a_key_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "features.key"
    key = read_key(path, named="SETTING")
    assert len(key) == KEY_BYTES
    assert read_key(path, named="SETTING") == key
    assert path.stat().st_mode & 0o777 == 0o600
    assert [one.name for one in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("size", [0, 15, MAX_KEY_BYTES + 1])
def test_a_key_of_a_wrong_size_is_refused_and_names_the_setting(tmp_path: Path, size: int) -> None:
    path = tmp_path / "key"
    path.write_bytes(bytes(size))
    with pytest.raises(SetupError, match="SETTING"):
        read_key(path, named="SETTING")


def test_where_no_key_can_be_kept_the_process_has_one_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "key"  # a folder cannot be made there, also not by root
    assert read_key(path, named="SETTING") != read_key(path, named="SETTING")
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


async def test_others_go_on_between_the_features_of_many_prompts(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn, made_in, of = 0, [], served.gateway.features.of

    def noted(ids: Sequence[int], numbers: Sequence[int], *, base: str) -> Features:
        made_in.append(turn)
        return of(ids, numbers, base=base)

    async def count() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(served.gateway.features, "of", noted)
    counting = asyncio.create_task(count())
    body = {"model": "legal", "prompt": ["Hi"] * 20, "max_tokens": 1}
    assert (await served.http.post("/v1/completions", json=body)).status_code == 200
    counting.cancel()
    assert len(made_in) == len(set(made_in)) == 20


def test_each_feature_has_a_name_for_people() -> None:
    made, ids = PromptFeatures(bytes(32)), [7, 8, 9, 8]
    numbers = (1, 4, 0, 10)
    named = made.named(ids, numbers)
    assert set(named) == set(made.of(ids, numbers).tolist())
    texts = {(name.kind, name.tokens) for name in named.values()}
    assert texts >= {
        ("token", (7,)),
        ("pair", (7, 8)),
        ("pair", (9, 8)),
        ("opening", (7, 8, 9)),
        ("last token", (8,)),
        ("last tokens", (9, 8)),
        ("length of the prompt", ()),
        ("temperature", ()),
        ("max_tokens", ()),
    }
