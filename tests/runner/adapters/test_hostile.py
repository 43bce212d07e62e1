"""Files that a tenant has made to hurt: refused in words, in little time and memory, and nothing in them runs."""

import json
import math
import os
import pickle
import re
import shutil
import struct
import sys
import time
import tracemalloc
from contextlib import suppress
from pathlib import Path

import pytest

from motet.clock import FakeClock
from motet.errors import AdapterIncompatible
from motet_runner.adapters.compatibility_check import MAX_LINEAR_BYTES, MAX_OTHER_BYTES, check, map_tensors
from motet_runner.adapters.module_patterns import MATCHING_SECONDS, Matcher
from motet_runner.adapters.peft_config import parse_config
from motet_runner.adapters.safetensors_header import MAX_HEADER_BYTES, check_whole, read_header
from motet_runner.adapters.weight_check import check_values
from tests.common.cpu_speed import cpu_unit_seconds
from tests.support.in_process_runner import write_adapter

MODULE = "model.layers.0.self_attn.q_proj"
SHAPES = {MODULE: (16, 16)}
A, B = (f"base_model.model.{MODULE}.lora_{half}.weight" for half in "AB")


@pytest.fixture
def folder(tmp_path):
    return write_adapter(tmp_path / "a")


def look(folder: Path) -> None:
    tracemalloc.start()
    began = time.thread_time()
    try:
        found = check(folder, SHAPES, max_rank=64)
        check_values(found.layout.file, found.tensors)
    finally:
        spent = time.thread_time() - began
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()  # what counts memory makes the yardstick ten times as long
        assert spent < 1 or spent < 40 * cpu_unit_seconds()
        assert peak < 200 << 20


MAX_MESSAGE = 1200


def refused(folder: Path, named: str, fix: str = "Save the adapter again") -> AdapterIncompatible:
    """It is refused with the field or the tensor, or the file where there is no such thing, and with what to do."""
    with pytest.raises(AdapterIncompatible) as caught:
        look(folder)
    assert re.search(named, caught.value.message), caught.value.message
    assert re.search(fix, caught.value.message), caught.value.message
    assert len(caught.value.message) < MAX_MESSAGE, "it is part of a status, whatever is in the file"
    return caught.value


def header_of(folder: Path) -> tuple[dict, bytes]:
    raw = (folder / "adapter_model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def write(folder: Path, header: bytes, body: bytes, *, length: int | None = None) -> None:
    size = struct.pack("<Q", len(header) if length is None else length)
    (folder / "adapter_model.safetensors").write_bytes(size + header + body)


def test_an_unchanged_adapter_passes(folder):
    look(folder)


HEADERS = {
    "absurd dimensions": lambda tensor: tensor | {"shape": [2**60, 16]},
    "a dimension of thousands of digits": lambda tensor: {**tensor, "shape": [0, 10**4000], "data_offsets": [0, 0]},
    "negative dimensions": lambda tensor: tensor | {"shape": [-4, -16]},
    "dimensions that are no numbers": lambda tensor: tensor | {"shape": ["4", [16]]},
    "no dimensions": lambda tensor: tensor | {"shape": None},
    "true for one": lambda tensor: tensor | {"shape": [True, 16]},
    "a start before the file": lambda tensor: tensor | {"data_offsets": [-256, tensor["data_offsets"][1]]},
    "an end before the start": lambda tensor: tensor | {"data_offsets": [256, 0]},
    "an end far beyond": lambda tensor: tensor | {"data_offsets": [0, 2**62]},
    "a hole": lambda tensor: tensor | {"data_offsets": [8, tensor["data_offsets"][1]]},
    "offsets that are no numbers": lambda tensor: tensor | {"data_offsets": ["0", "256"]},
    "fractions": lambda tensor: tensor | {"data_offsets": [0.5, 256.5]},
    "another size than its shape's": lambda tensor: tensor | {"shape": [4, 8]},
    "an unknown type": lambda tensor: tensor | {"dtype": "F4096"},
    "a type that is no text": lambda tensor: tensor | {"dtype": ["F32"]},
    "nothing": lambda tensor: None,
    "a list": lambda tensor: [tensor],
}


@pytest.mark.parametrize("how", HEADERS)
def test_row_29_a_tensor_with_a_false_description_is_refused(folder, how):
    header, body = header_of(folder)
    header[A] = HEADERS[how](header[A])
    write(folder, json.dumps(header).encode(), body)
    refused(folder, re.escape(A), "one of the types F32" if how == "an unknown type" else "Save the adapter again")


def test_a_name_of_thousands_of_parts_is_refused_at_once(folder):
    """Its parts are taken off one by one."""
    header, body = header_of(folder)
    name = "module." * 200 + A
    write(folder, json.dumps({name: header[A]} | header).encode(), body)
    refused(folder, r"the name module\.module\..* has more than 1024 characters")


def test_row_29_two_tensors_on_the_same_bytes_are_refused(folder):
    header, body = header_of(folder)
    header[A]["data_offsets"] = header[B]["data_offsets"]
    write(folder, json.dumps(header).encode(), body)
    refused(folder, rf"broken: ({re.escape(A)}|{re.escape(B)}) does not begin where")


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 1 << 40, 0, 7])
def test_row_29_a_header_of_an_absurd_length_is_refused(folder, length):
    header, body = header_of(folder)
    write(folder, json.dumps(header).encode(), body, length=length)
    refused(
        folder,
        r"adapter_model\.safetensors (is not a safetensors file|is not valid JSON)",
        "Save (the adapter|it) again",
    )


@pytest.mark.parametrize(
    "text", [b"[" * 200_000, b'{"a":' * 100_000, b"\xff\xfe", b"1e999", b"[]", b'"x"', b'{"a": 1' + b"0" * 6000 + b"}"]
)
def test_row_31_hostile_json_is_refused(folder, text):
    _, body = header_of(folder)
    write(folder, text, body)
    refused(folder, r"[Tt]he header of adapter_model\.safetensors is", "Save (the adapter|it) again")
    write_adapter(folder)
    (folder / "adapter_config.json").write_bytes(text)
    refused(folder, r"adapter_config\.json (is|must)", "Save (the adapter|it) again")


def test_row_31_a_doubled_key_is_refused(folder):
    header, body = header_of(folder)
    again = json.dumps(header)[:-1] + f', "{A}": {json.dumps(header[A])}' + "}"
    write(folder, again.encode(), body)
    refused(folder, f"{re.escape(A)}' twice", "Remove one of them")
    write_adapter(folder)
    config = (folder / "adapter_config.json").read_text()
    (folder / "adapter_config.json").write_text(config[:-1] + ', "r": 4}')
    refused(folder, "'r' twice", "Remove one of them")


def test_a_doubled_key_is_found_without_comparing_every_key_with_every_other(folder):
    many = ", ".join(f'"{n}": 0' for n in range(120_000))
    (folder / "adapter_config.json").write_text("{" + many[: 1 << 19].rpartition(",")[0] + ', "r": 1, "r": 2}')
    with pytest.raises(AdapterIncompatible, match="'r' twice"):
        look(folder)
    _, body = header_of(folder)
    write(folder, ("{" + many + ', "r": 1, "r": 2}').encode(), body)
    write_adapter(folder.parent / "whole")
    shutil.copy(folder.parent / "whole/adapter_config.json", folder)
    with pytest.raises(AdapterIncompatible, match="'r' twice"):
        read_header(folder / "adapter_model.safetensors")


@pytest.mark.parametrize("piece", [b"[]", b"{}", b"0", b'{"a":0}', b'""'])
def test_a_header_that_holds_more_values_than_any_adapter_has_is_not_parsed(folder, piece, monkeypatch):
    _, body = header_of(folder)
    write(folder, b'{"a":[' + b",".join([piece] * (6_000_000 // len(piece))) + b"]}", body)
    monkeypatch.setattr(json, "loads", None)
    with pytest.raises(AdapterIncompatible, match="more than 500000 values"):
        read_header(folder / "adapter_model.safetensors")


@pytest.mark.parametrize("how", HEADERS)
def test_a_fetch_refuses_nothing_that_the_check_takes(folder, how):
    """It only looks at the size, and so cannot say what else is wrong."""
    weights = folder / "adapter_model.safetensors"
    header, body = header_of(folder)
    check_whole(weights)
    write(folder, json.dumps(header, separators=(" , ", " : ")).encode() + b" ", body)
    check_whole(weights)
    read_header(weights)
    header[A] = HEADERS[how](header[A])
    write(folder, json.dumps(header).encode(), body)
    try:
        check_whole(weights)
    except AdapterIncompatible:
        with pytest.raises(AdapterIncompatible):
            read_header(weights)


def test_a_fetch_finds_weights_that_are_cut_short_or_something_else(folder):
    weights = folder / "adapter_model.safetensors"
    whole = weights.read_bytes()
    for length in (0, 7, 8, 100, len(whole) // 2, len(whole) - 1):
        weights.write_bytes(whole[:length])
        with pytest.raises(AdapterIncompatible):
            check_whole(weights)
    for other in (whole + b"0", b"x" * 100, pickle.dumps(whole), b"version https://git-lfs.github.com/spec/v1\n"):
        weights.write_bytes(other)
        with pytest.raises(AdapterIncompatible):
            check_whole(weights)


def test_the_longest_header_is_parsed_once_with_few_calls_for_each_tensor(folder, monkeypatch):
    """A fetch parses nothing of it. Counted, because a clock also shows what else the machine does."""
    weights = folder / "adapter_model.safetensors"
    entry = '"%0200d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    count = MAX_HEADER_BYTES // (len(entry % 0) + 1)
    write(folder, ("{" + ",".join(entry % n for n in range(count)) + "}").encode(), b"")
    assert weights.stat().st_size > MAX_HEADER_BYTES - 1000
    parsed, calls = [], [0]
    loads = json.loads
    monkeypatch.setattr(json, "loads", lambda raw, **how: parsed.append(len(raw)) or loads(raw, **how))

    def count_call(_frame, event, _argument):
        calls[0] += event == "call"

    sys.setprofile(count_call)
    try:
        check_whole(weights)
        of_fetch = calls[0]
        calls[0] = 0
        with pytest.raises(AdapterIncompatible, match=f"{count} of {count} tensors belong to no linear"):
            map_tensors(read_header(weights), SHAPES)
    finally:
        sys.setprofile(None)
    assert of_fetch < 100
    assert [one for one in parsed if one > 1 << 20] == [weights.stat().st_size - 8]
    assert calls[0] <= 14 * count


@pytest.mark.parametrize(
    ("module", "named", "fix"),
    [
        ("x", "x.lora_A.weight belongs to none", "another model"),
        ("model.layers.0.mlp.experts.0.up_proj", "experts", ""),
    ],
)
def test_a_header_that_no_adapter_of_the_base_model_has_is_not_parsed(folder, module, named, fix, monkeypatch):
    header, body = header_of(folder)
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    name = f"base_model.model.{module}.lora_A.weight"
    others = {f"{number:0200}": entry for number in range(5000)}
    write(folder, json.dumps({"__metadata__": {"format": "pt"}} | {name: entry} | header | others).encode(), body)
    loads = json.loads
    monkeypatch.setattr(json, "loads", lambda raw, **how: loads(raw, **how) if len(raw) < 1 << 16 else 1 / 0)
    refused(folder, named, fix)


def test_a_header_may_have_some_other_data(folder):
    header, body = header_of(folder)
    for chars, fits in ((MAX_OTHER_BYTES - 1000, True), (MAX_OTHER_BYTES + MAX_LINEAR_BYTES, False)):
        write(folder, json.dumps({"__metadata__": {"tags": "x" * chars}} | header).encode(), body)
        if fits:
            look(folder)
    refused(folder, "too long", "without other data")


@pytest.mark.parametrize("depth", [33, 200, 900])
def test_too_deeply_nested_json_is_refused(folder, depth):
    for field in ("loftq_config", "a_field_of_the_future", "r", "rank_pattern"):
        write_adapter(folder, **{field: "DEEP"})
        config = folder / "adapter_config.json"
        config.write_text(config.read_text().replace('"DEEP"', '{"a":[' * (depth // 2) + "]}" * (depth // 2)))
        refused(
            folder, f"adapter_config.json is nested|{field} is ", "Save it again|Motet does not know this|It must be"
        )


def test_long_names_are_cut_in_messages(folder):
    header, body = header_of(folder)
    names = {A: "model." + "x" * 3_000_000 + ".lora_A.weight", B: "y" * 3_000_000}
    write(folder, json.dumps({names[name]: tensor for name, tensor in header.items()}).encode(), body)
    with pytest.raises(AdapterIncompatible) as refused:
        look(folder)
    assert len(refused.value.message) < 1000
    write(folder, json.dumps({A: header[A] | {"dtype": "F" * 1_000_000}, B: header[B]}).encode(), body)
    with pytest.raises(AdapterIncompatible) as refused:
        look(folder)
    assert len(refused.value.message) < 1000
    write_adapter(folder, **{"z" * 500_000: 1})
    with pytest.raises(AdapterIncompatible) as refused:
        look(folder)
    assert len(refused.value.message) + len(refused.value.param) < 1000


WHOLE, ALPHA = "It must be a whole number of at least 1", "It must be a number from"
NUMBER, UNKNOWN, NAMES = (
    "is not a number in JSON. Replace it",
    "Motet does not know this field. Remove it",
    "a list of names",
)
INSTEAD = "Name the modules instead"


@pytest.mark.parametrize(
    ("field", "value", "fix"),
    [
        ("r", 0, WHOLE), ("r", -1, WHOLE), ("r", 10**30, "Was the adapter trained on another"),
        ("r", True, WHOLE), ("r", math.nan, NUMBER), ("r", "4", WHOLE), ("r", 4.5, WHOLE), ("r", [4], WHOLE),
        ("r", None, WHOLE), ("lora_alpha", math.nan, NUMBER), ("lora_alpha", math.inf, NUMBER),
        ("lora_alpha", 10**400, ALPHA), ("lora_alpha", 0, "Set the alpha of the training"), ("lora_alpha", "8", ALPHA),
        ("alpha_pattern", {"q_proj": math.nan}, NUMBER), ("alpha_pattern", {"q_proj": "8"}, ALPHA),
        ("alpha_pattern", ["q_proj"], "It must be an object"), ("rank_pattern", {"q_proj": 0}, WHOLE),
        ("rank_pattern", {"(": 4}, INSTEAD), ("rank_pattern", "q_proj", "It must be an object"),
        ("rank_pattern", {"(?R)": 4}, INSTEAD), ("target_modules", "(", INSTEAD), ("target_modules", [1], NAMES),
        ("target_modules", {"q_proj": 1}, NAMES), ("target_modules", None, "Name those that have tensors"),
        ("target_modules", ["k_proj"], "Change target_modules, or remove the tensors"),
        ("exclude_modules", "(", INSTEAD), ("exclude_modules", [["q_proj"]], NAMES),
        ("exclude_modules", ["q_proj"], "Change exclude_modules, or remove the tensors"),
        ("layers_to_transform", [3], "Change layers_to_transform, or remove the tensors"),
        ("layers_to_transform", ["0"], "It must be the number of a layer, or a list of numbers"),
        ("layers_pattern", ["h"], "PEFT allows it only with layers_to_transform"),
        ("auto_map", {"x": "evil.py"}, UNKNOWN), ("trust_remote_code", True, UNKNOWN),
        ("peft_type", ["LORA"], "Motet serves only LORA"), ("peft_type", "ADALORA", "Motet serves only LORA"),
        ("task_type", {}, "It must be a name"), ("bias", "some", "PEFT knows none, all and lora_only"),
        ("use_dora", "yes", "It must be true or false"), ("use_dora", True, "with the config of its training"),
        ("lora_bias", True, "with the config of its training"), ("lora_bias", 1, "It must be true or false"),
        ("modules_to_save", ["lm_head"], "merge it"), ("layer_replication", [[0, 1]], "merge it"),
        ("use_qalora", True, "merge it"), ("use_bdlora", {"x": 1}, "merge it"), ("arrow_config", {"x": 1}, "merge it"),
        ("alora_invocation_tokens", [5], "Train a plain LoRA"), ("trainable_token_indices", [1], "merge it"),
        ("target_parameters", ["w"], "by their names in target_modules"), ("kasa_config", {"x": 1}, "merge it"),
        ("monteclora_config", {"x": 1}, "merge it"), ("init_lora_weights", "pissa", "Save it as a plain LoRA"),
        ("init_lora_weights", "loftq", "Save it as a plain LoRA"), ("init_lora_weights", 2, "Save it as a plain LoRA"),
    ],
    ids=str,
)  # fmt: skip
def test_row_31_a_hostile_configuration_is_refused(folder, field, value, fix):
    write_adapter(folder, **{field: value})
    named = {math.nan: r"NaN as \w+", math.inf: "Infinity as lora_alpha"}.get(value if isinstance(value, float) else 0)
    if field == "r" and value == 10**30:
        named = f"With rank {value} from adapter_config.json"
    refused(folder, named or (r"NaN as q_proj" if fix == NUMBER else field), fix)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fifth of the usual time for what is slow"""
    monkeypatch.setitem(Matcher.__init__.__kwdefaults__, "seconds", MATCHING_SECONDS / 5)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    "pattern", [r"((\w|\.)+)+[!?]", "(.*)" * 20 + "[!?]", r"(([a-z_.0-9]+)*)*[!?]", "(.*)" * 14 + r"\1\2\3\4\5[!?]"]
)
def test_row_31_an_endless_regular_expression_stops_nothing(folder, pattern):
    for fields in ({"target_modules": pattern}, {"rank_pattern": {pattern + "x?" * n: 8 for n in range(20)}}):
        write_adapter(folder, **fields)
        with suppress(AdapterIncompatible):
            look(folder)  # in bounded time


LINEARS = {f"model.layers.{n // 7}.self_attn.proj{n % 7}": (16, 16) for n in range(560)}
"""As many as a model of 70 billion parameters has."""


def spent(config: dict[str, object]) -> float:
    """Seconds of this thread for all the matching that a check does."""
    began = time.thread_time()
    with suppress(AdapterIncompatible):
        found = parse_config(
            {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
            | config
        )
        for module in LINEARS:
            found.rank_of(module)
            found.scale_of(module)
            found.unselected_by(module)
    return time.thread_time() - began


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    "config",
    [
        {"rank_pattern": {f"x{n}": 8 for n in range(60_000)}},
        {"rank_pattern": {f"(x|y){n}": 8 for n in range(40_000)}},
        {"alpha_pattern": {"(a|b|c)*" * 100 + str(n): 8 for n in range(1_000)}},
        {"rank_pattern": {f"(.*)(.*)(.*){n}": 8 for n in range(10_000)}},
        {"target_modules": [f"x{n}" for n in range(100_000)]},
        {
            "target_modules": ["proj0"],
            "layers_to_transform": 1,
            "layers_pattern": [f"(.*)(.*){n}" for n in range(9_000)],
        },
    ],
    ids=["names", "patterns", "long patterns", "slow patterns", "targets", "layers"],
)
def test_all_patterns_of_one_adapter_together_take_bounded_time(config):
    """Each by itself is quick: none of them ever takes too long."""
    assert spent(config) < 8 * MATCHING_SECONDS


def test_a_pattern_for_every_module_of_a_large_model_is_accepted():
    names = {f"{name}": 8 for name in LINEARS}
    config = parse_config(
        {
            "peft_type": "LORA",
            "r": 4,
            "lora_alpha": 8,
            "target_modules": ["q_proj"],
            "task_type": "CAUSAL_LM",
            "rank_pattern": names,
        }
    )
    assert {config.rank_of(module) for module in LINEARS} == {8}
    escaped = {name.replace(".", r"\."): 8 for name in list(LINEARS)[:100]}
    config = parse_config(
        {
            "peft_type": "LORA",
            "r": 4,
            "lora_alpha": 8,
            "target_modules": ["q_proj"],
            "task_type": "CAUSAL_LM",
            "rank_pattern": escaped,
        }
    )
    assert sum(config.rank_of(module) == 8 for module in LINEARS) == 100


def test_all_patterns_share_one_time_limit():
    clock = FakeClock()

    def slow(seconds: float) -> float:
        clock.advance(seconds)
        return clock()

    matcher = Matcher("adapter_config.json", seconds=1.0, clock=lambda: slow(0.1))
    asked = 0
    with pytest.raises(AdapterIncompatible, match="takes too long"):
        for asked in range(100):  # noqa: B007
            matcher.first({"(a|b)": 1}, "model.a", 0)
    assert 1 <= asked <= 10


@pytest.mark.usefixtures("impatient")
def test_a_regular_expression_that_takes_too_long_is_named(folder):
    write_adapter(folder, target_modules="(.*)" * 14 + r"\1\2\3\4\5[!?]")
    with pytest.raises(AdapterIncompatible, match="takes too long") as refused:
        look(folder)
    assert refused.value.reason == "FormatRejected"


@pytest.mark.parametrize(
    "pattern",
    [
        "(?:(?:(?:x{9999}){9999}){9999})",
        "((x{100}){100}){100}",
        "(?R)",
        "(?:q){e<=3}",
        "(" * 900 + ")" * 90,
        "q" * 2000,
    ],
)
def test_row_31_a_regular_expression_that_needs_much_memory_is_not_compiled(folder, pattern):
    write_adapter(folder, rank_pattern={pattern: 4})
    with pytest.raises(AdapterIncompatible, match=r"rank_pattern is .* Name the modules instead"):
        look(folder)


def test_regular_expressions_of_common_tools_are_accepted(folder):
    pattern = r"(?:.*?(?:language|text).*?(?:q_proj).*?)|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn)\.(?:(?:q_proj)))"
    write_adapter(folder, target_modules=pattern)
    look(folder)


def test_row_30_no_pickle_is_loaded(folder, tmp_path):
    proof = tmp_path / "code-ran"

    class Payload:
        def __reduce__(self):
            return os.system, (f"touch {proof}",)

    payload = pickle.dumps(Payload())
    for name in ("adapter_model.safetensors", "adapter_model.bin", "adapter_config.json"):
        (folder / name).write_bytes(payload)
        refused(folder, r"adapter_(model|config)\.", "Save (it|the adapter) again")
    assert not proof.exists()
    pickle.loads(payload)
    assert proof.exists(), "the payload works"


def test_row_28_the_first_three_unknown_tensors_are_named(folder):
    header, body = header_of(folder)
    names = {A: "model.h.0.c_attn.lora_A.weight", B: "model.h.0.c_attn.lora_B.weight"}
    write(folder, json.dumps({names.get(name, name): tensor for name, tensor in header.items()}).encode(), body)
    with pytest.raises(AdapterIncompatible, match=r"lora_A\.weight, model\.h\.0\.c_attn\.lora_B") as refused:
        look(folder)
    assert refused.value.reason == "UnmappedTensors"
