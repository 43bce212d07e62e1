"""Traces as others publish them, and rows that cannot be right."""

import gzip
import json
import os
import tracemalloc
from pathlib import Path

import pytest

from motet.errors import SetupError
from motet_simulator import lines
from motet_simulator.workloads import complete
from motet_simulator.workloads.complete import Completion, adapters_asked_for, workload
from motet_simulator.workloads.jsonl import line_of
from motet_simulator.workloads.popularity import Law
from motet_simulator.workloads.request import WorkloadRequest
from motet_simulator.workloads.traces import read

FORMS = {
    "azure": (
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n"
            "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
        ),
        [(0.0, 374, 44, None), (4.314579, 396, 109, None)],
    ),
    "mooncake": (
        (
            '{"timestamp": 3000, "input_length": 700, "output_length": 5, "hash_ids": [0, 4]}\n'
            '{"timestamp": 4500, "input_length": 513, "output_length": 6, "hash_ids": [0, 5]}\n'
        ),
        [(0.0, 700, 5, None), (1.5, 513, 6, None)],
    ),
    "lengths": ("ContextTokens,GeneratedTokens\n107,15\n18,222\n", [(None, 107, 15, None), (None, 18, 222, None)]),
    "arena": (
        "req_id,prompt_len,output_len,req_time,adapter\n0,13,199,0.5,13\n1,36,137,0.75,2\n",
        [(0.0, 13, 199, "13"), (0.25, 36, 137, "2")],
    ),
    "gentd26": (
        (
            "gmt_create,predict_type,groupId,checkpoint_model_version_id\n"
            "2024-11-15 16:57:50,T,G0,M0\n2024-11-15 16:58:00,T,G1,M1\n"
        ),
        [(0.0, None, None, "M0"), (10.0, None, None, "M1")],
    ),
    "gentd26 adapters": (
        'predict_type,base_model,loras\nT,B0,\nT,B1,"L1:0.8;L2:1"\n',
        [(None, None, None, ""), (None, None, None, "L1")],
    ),
    "our own": (
        (
            '{"at": 1, "prompt_tokens": 4, "output_tokens": 2}\n'
            '{"at": 2, "prompt_tokens": 5, "output_tokens": 3, "adapter": "a", "tenant": "t", "class": "batch"}\n'
        ),
        [(0.0, 4, 2, ""), (1.0, 5, 3, "a")],
    ),
}


ROW = b'{"at": 0, "prompt_tokens": 4, "output_tokens": 1}\n'


def written(folder: Path, text: str | bytes, name: str = "trace") -> Path:
    file = folder / name
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return file


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("compressed", [False, True])
def test_a_trace_is_known_by_its_first_line(form: str, tmp_path: Path, *, compressed: bool) -> None:
    text, expected = FORMS[form]
    file = written(tmp_path, gzip.compress(text.encode()), "trace.gz") if compressed else written(tmp_path, text)
    found = [(row.at, row.prompt_tokens, row.output_tokens, row.adapter) for row in read(file)]
    assert [one[1:] for one in found] == [one[1:] for one in expected]
    assert [one[0] for one in found] == [pytest.approx(one[0], abs=1e-5) for one in expected]


def test_every_form_becomes_our_own_and_stays_the_same(tmp_path: Path) -> None:
    lengths = written(tmp_path, FORMS["lengths"][0], "lengths")
    for number, (text, _) in enumerate(FORMS.values()):
        completion = Completion(lengths=lengths, rate=5.0, adapters=3, seed=number)
        requests = list(workload(written(tmp_path, text), completion))
        ours = written(tmp_path, "".join(line_of(one) + "\n" for one in requests), "ours")
        again = list(workload(ours, Completion()))
        for one, other in zip(requests, again, strict=True):
            assert other.at == pytest.approx(one.at - requests[0].at, abs=1e-5)
            assert json.loads(line_of(one)) | {"at": 0} == json.loads(line_of(other)) | {"at": 0}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        ("what is this\n", "of none of the known forms"),
        ('{"neither": 1}\n', "of none of the known forms"),
        ('{"at": 0}\n', "line 1: prompt_tokens is None"),
        ('{"at": 0, "prompt_tokens": 4, "output_tokens": 0}\n', "line 1: output_tokens is 0: it must be a whole"),
        ('{"at": 0, "prompt_tokens": 4.5, "output_tokens": 1}\n', "line 1: prompt_tokens is 4.5"),
        ('{"at": NaN, "prompt_tokens": 4, "output_tokens": 1}\n', "line 1: at is nan: it must be a number from 0"),
        ('{"at": 1e999, "prompt_tokens": 4, "output_tokens": 1}\n', "line 1: at is inf"),
        ('{"at": true, "prompt_tokens": 4, "output_tokens": 1}\n', "line 1: at is True"),
        ('{"at": 0, "prompt_tokens": 4, "output_tokens": 1, "adaptor": "a"}\n', "line 1: there is no 'adaptor'"),
        ('{"at": 0, "prompt_tokens": 4, "output_tokens": 1, "class": "vip"}\n', "line 1: class is 'vip'"),
        ('{"at": 0, "prompt_tokens": 4, "output_tokens": 1, "blocks": [-1]}\n', "line 1: blocks must have whole"),
        ('{"at": 0, "prompt_tokens": 4, "output_tokens": 1, "block_tokens": 20}\n', "line 1: block_tokens is 20"),
        ('{"at": 0, "prompt_tokens": 4, "output_tokens": 1}\n\n[]\n', "line 3: it is no JSON object"),
        ('{"at": 0, "prompt_tokens": 4, "output_tokens": 1}\n{"at', "line 2: it is no JSON"),
        ("ContextTokens,GeneratedTokens\n1,2\n3\n", "line 3: it has 1 values, and the header 2"),
        (
            '{"at": 0, "prompt_tokens": 1e300, "output_tokens": 1}\n',
            "is 1e+300: it must be a whole number from 1 to 16777216",
        ),
        ('{"at": 0, "prompt_tokens": -1, "output_tokens": 1}\n', "is -1: it must be a whole number from 1 to 16777216"),
        ('{"at": 0, "prompt_tokens": NaN, "output_tokens": 1}\n', "is nan: it must be a whole number from 1 to"),
        (f'{{"at": 0, "prompt_tokens": {"9" * 400}, "output_tokens": 1}}\n', "…: it must be a whole number from 1 to"),
        (
            '{"at": 0, "prompt_tokens": 4, "output_tokens": 1, "adapter": "/"}\n',
            "line 1: the adapter is '/': it must be a",
        ),
        ('{"at": 0, "prompt_tokens": 4, "output_tokens": 1, "adapter": "a/b/c"}\n', "line 1: the adapter is 'a/b/c'"),
        ('{"at": 0, "prompt_tokens": 4, "output_tokens": 1, "adapter": "a/ "}\n', "line 1: the adapter is 'a/ '"),
        ('ContextTokens,GeneratedTokens\n1,2\n1,"' + "2" * 200_000 + "\n", "line 3: it is no row of a CSV file"),
        ("ContextTokens,GeneratedTokens\n1,2\nx,2\n", "line 3: ContextTokens is 'x': it must be a number"),
        (
            '{"at": 9, "prompt_tokens": 4, "output_tokens": 1}\n{"at": 7.5, "prompt_tokens": 4, "output_tokens": 1}\n',
            "line 2: its time is 1.5 s before that of line 1; sort the file by time",
        ),
    ],
)
def test_a_bad_row_is_refused_with_its_line(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(SetupError) as refused:
        list(read(written(tmp_path, text)))
    assert says in refused.value.message


@pytest.mark.parametrize(
    ("text", "says"), [(b"", "line 1: it is longer than 1 MiB"), (ROW * 30_000, "line 20001: a file")]
)
def test_a_long_line_and_a_long_file_are_refused_in_bounded_memory(
    text: bytes, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "MAX_ROWS", 20_000)
    file = written(tmp_path, text)
    os.truncate(file, 1 << 30)  # what is not written takes no place
    tracemalloc.start()
    try:
        with pytest.raises(SetupError) as refused:
            for _ in read(file):
                pass
        assert says in refused.value.message
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_what_is_no_regular_file_is_refused_by_name(tmp_path: Path) -> None:
    """It could not be read twice, and a plan does."""
    os.mkfifo(tmp_path / "pipe")
    for file in (tmp_path / "pipe", tmp_path):
        with pytest.raises(SetupError) as refused:
            list(read(file))
        assert refused.value.message.startswith(f"{file} is no regular file.")


def test_a_damaged_compressed_file_is_refused(tmp_path: Path) -> None:
    whole = gzip.compress(FORMS["azure"][0].encode())
    for damaged in (whole[:-9], b"no gzip at all"):
        with pytest.raises(SetupError, match=r"damaged"):
            list(read(written(tmp_path, damaged, "trace.gz")))
    with pytest.raises(SetupError, match=r"No such file"):
        list(read(tmp_path / "absent"))


def test_what_a_trace_lacks_is_said(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"--rate"):
        list(workload(written(tmp_path, FORMS["lengths"][0]), Completion()))
    with pytest.raises(SetupError, match=r"--lengths"):
        list(workload(written(tmp_path, FORMS["gentd26"][0]), Completion()))


def test_adapters_are_those_of_the_trace_or_those_that_are_asked_for(tmp_path: Path) -> None:
    file = written(tmp_path, FORMS["arena"][0])
    assert adapters_asked_for(file, Completion()) == ["13", "2"]
    assert adapters_asked_for(file, Completion(adapters=2)) == ["adapter-0", "adapter-1"]
    asked = [one.adapter for one in workload(file, Completion(adapters=2, law=Law.DISTINCT))]
    assert asked == ["adapter-0", "adapter-1"]
    assert [one.adapter for one in workload(file, Completion(adapters=0))] == ["", ""]


def test_an_adapter_has_one_name(tmp_path: Path) -> None:
    names = ["x", "default/x", "t/x"]
    rows = (json.dumps({"at": 0, "prompt_tokens": 4, "output_tokens": 1, "adapter": name}) + "\n" for name in names)
    file = written(tmp_path, "".join(rows))
    assert [row.adapter for row in read(file)] == ["x", "x", "t/x"]
    assert adapters_asked_for(file, Completion()) == ["x", "t/x"]


def test_more_adapters_than_a_plan_can_have_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(complete, "MAX_ADAPTERS", 2)
    file = written(tmp_path, FORMS["arena"][0] + "2,1,1,0.75,2\n3,1,1,0.8,3\n")
    with pytest.raises(SetupError, match=r"line 5: a plan has at most 2 adapters. Take fewer requests"):
        adapters_asked_for(file, Completion())
    assert adapters_asked_for(file, Completion(requests=3)) == ["13", "2"]


def test_a_time_that_no_workload_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"line 3: its time is 4.31e\+09 s; the last may be 1e\+09 s."):
        list(workload(written(tmp_path, FORMS["azure"][0]), Completion(speed=1e-9)))


def test_time_passes_as_fast_as_asked(tmp_path: Path) -> None:
    file = written(tmp_path, FORMS["azure"][0])
    assert [one.at for one in workload(file, Completion(speed=2.0))] == [0.0, pytest.approx(4.314579 / 2)]


def test_prompts_are_equal_where_their_blocks_are() -> None:
    def prompt(number: int, *blocks: int, tokens: int = 100) -> tuple[int, ...]:
        request = WorkloadRequest(at=0, prompt_tokens=tokens, output_tokens=1, blocks=blocks, block_tokens=32)
        return request.prompt(number)

    first, second = prompt(1, 7, 8, 9), prompt(2, 7, 8, 10)
    assert len(first) == len(second) == 100
    assert first[:64] == second[:64]
    assert not set(first[64:]) & set(second[64:])
    assert len(prompt(1, 7, 8, 9, tokens=40)) == 40, "a block that does not fit is the request's own"
    assert not set(prompt(1)) & set(prompt(2))
