"""Compiled kernels on machines where something is wrong: one clear line, and never wrong results."""

import ctypes
import errno
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from motet_kernels.cpp import CannotBuild, Library, amx_permission, build, builder, programs
from motet_kernels.cpp.builder import ABANDONED_SECONDS, SOURCE
from motet_kernels.cpp.compiler import (
    INSTRUCTION_SETS,
    OPTIONS,
    compile_library,
    cpu_flags,
    first_error,
    instruction_sets,
)
from motet_kernels.cpp.passed_mark import PassedMark, mark_of
from motet_kernels.cpp.self_test import SelfTestFailed, check
from testbed.compiled_kernels import needs_a_compiler
from testbed.machine import bound_by_permissions

BASIC = frozenset({"nothing special"})


UNOPTIMISED = (*OPTIONS, "-O0")
"""A compiler is done in a fifth of the time."""


PASSED: set[bytes] = set()


def check_once(library: Library) -> None:
    """The test of a library that was not optimised takes longer than all else here: what has passed passes again."""
    digest = hashlib.sha256(library.path.read_bytes()).digest()
    if digest not in PASSED:
        check(library)
        PASSED.add(digest)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a CPU for which there is little to compile."""
    monkeypatch.setattr(builder, "check", check_once)
    monkeypatch.setattr("motet_kernels.cpp.builder.cpu_flags", lambda: BASIC)
    monkeypatch.setattr("motet_kernels.cpp.compiler.OPTIONS", UNOPTIMISED)
    return tmp_path / "cache" / "kernels"


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def copied(library: Path) -> str:
    """What a compiler of a script does in place of compiling"""
    return f'for into; do :; done; cp {library} "$into"'


def with_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, change: Callable[[str], str]) -> None:
    copy = tmp_path / "source"
    shutil.copytree(SOURCE, copy)
    text = (copy / file).read_text()
    assert change(text) != text
    (copy / file).write_text(change(text))
    monkeypatch.setattr("motet_kernels.cpp.builder.SOURCE", copy)


def libraries(cache: Path) -> list[Path]:
    return sorted(cache.glob("*.so"))


def forget_what_passed(cache: Path) -> None:
    """As on another machine"""
    builder.passed.clear()
    for library in libraries(cache):
        mark_of(library).unlink(missing_ok=True)


def test_a_library_is_built_once(cache: Path, compiled_in_parts: None) -> None:
    first = build(cache)
    assert (first.instructions, first.library.lanes) == ("basic", 4)
    assert first.seconds > 0
    again = build(cache)
    assert again.seconds == 0
    assert sorted(path.suffix for path in cache.iterdir()) == [".passed", ".so"], "nothing else is left behind"


THREE = 'int one(); extern "C" int three() { return one() + TWO; }'


def test_all_sources_become_one_library(tmp_path: Path) -> None:
    """Other tests compile the kernels part by part, each part once, or find them in a cache."""
    sources, library = [tmp_path / "one.cpp", tmp_path / "three.cpp"], tmp_path / "three.so"
    for source, text in zip(sources, ("int one() { return 1; }", THREE), strict=True):
        source.write_text(text)
    compile_library(needs_a_compiler(), sources, ("-DTWO=2",), library)
    assert ctypes.CDLL(str(library)).three() == 3


@pytest.fixture
def tests(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """The processes that would test a library. It passes."""
    found: list[Sequence[str]] = []

    def noted(command: Sequence[str], *, seconds: float) -> "subprocess.CompletedProcess[str]":
        found.append(command)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(builder, "run", noted)
    monkeypatch.setattr(builder, "passed", set())
    return found


def test_a_library_is_tested_in_a_process_of_its_own_once_on_a_machine(
    cache: Path, quick: None, tests: list[Sequence[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def processes() -> int:
        """That test it when another process wants the library"""
        tests.clear()
        builder.passed.clear()
        build(cache)
        return len(tests)

    assert (processes(), processes(), processes()) == (1, 0, 0)
    with monkeypatch.context() as patch:
        patch.setattr("platform.platform", lambda: "another machine")
        assert (processes(), processes()) == (1, 0)
    assert processes() == 1
    cache.chmod(0o500)
    with bound_by_permissions():
        assert (processes(), processes()) == (1, 1)
        assert build(cache).unmarked == os.strerror(errno.EACCES), "the log says it"
    cache.chmod(0o700)


def test_a_library_that_ends_a_process_is_tested_in_a_process_of_its_own_again(
    cache: Path, quick: None, tests: list[Sequence[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    build(cache)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(builder, "checked", raise_interrupt)
        build(cache)
    assert [path.suffix for path in cache.iterdir()] == [".so"]
    builder.passed.clear()
    tests.clear()
    build(cache)
    assert len(tests) == 1


def raise_interrupt(_: object) -> None:
    raise KeyboardInterrupt


def test_another_source_and_another_compiler_give_another_library(
    cache: Path, quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = needs_a_compiler()
    build(cache)
    other = script(tmp_path / "other-c++", f'exec {compiler} "$@"')
    assert build(cache, other).seconds > 0
    with_source(tmp_path, monkeypatch, "library.cpp", lambda text: text + "// changed\n")
    assert build(cache).seconds > 0
    assert len(libraries(cache)) == 3


def test_the_fastest_instructions_of_the_cpu_are_taken() -> None:
    names = [one.name for one in instruction_sets(cpu_flags())]
    assert names[-1] == "basic"
    assert [one.name for one in instruction_sets(frozenset().union(*(one.cpu_flags for one in INSTRUCTION_SETS)))] == [
        "amx-bf16", "avx512-bf16", "avx512", "avx2", "basic",
    ]  # fmt: skip
    assert [one.name for one in instruction_sets(frozenset({"avx2", "fma", "f16c"}))] == ["avx2", "basic"]
    assert [one.name for one in instruction_sets(frozenset({"avx512f", "avx2"}))] == ["basic"], "some are missing"


BUILD = f"""
import sys
from pathlib import Path
from motet_kernels.cpp import builder, compiler
builder.cpu_flags = lambda: frozenset({{"nothing special"}})
compiler.OPTIONS = {UNOPTIMISED}
print(builder.build(Path(sys.argv[1]), sys.argv[2]).instructions)
"""


def test_of_two_processes_that_want_one_library_one_builds_it(cache: Path, basic: Path, tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    noted = script(tmp_path / "noted", f"[ $1 = --version ] && exit; echo called >> {calls}; sleep 1; {copied(basic)}")
    command = [sys.executable, "-c", BUILD, str(cache), noted]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [one.communicate(timeout=300)[0] for one in both] == ["basic\n"] * 2
    assert sorted(path.suffix for path in cache.iterdir()) == [".passed", ".so"]
    assert calls.read_text() == "called\n"


def test_nobody_waits_longer_for_another_build_than_a_build_takes(
    cache: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder, "WAIT_SECONDS", 0.3)
    cache.mkdir(parents=True, mode=0o700)
    with builder._alone(cache):  # noqa: SLF001
        assert build(cache).seconds > 0


def processes_with(word: str) -> list[str]:
    found = subprocess.run(["ps", "-ww", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    return [line for line in found.splitlines() if word in line and "ps -ww" not in line]


def test_a_compiler_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    """Also what the compiler has started: it is a driver of other programs."""
    name = f"compiler-{os.getpid()}"
    compiler = script(tmp_path / name, f'exec_part() {{ "{tmp_path}/{name}-part"; }}; exec_part & exec_part; wait')
    script(tmp_path / f"{name}-part", "sleep 100; exit 0")
    run_it = f"import programs; programs.run([{compiler!r}], seconds=100)"  # without torch, whose import takes seconds
    engine = subprocess.Popen([sys.executable, "-c", run_it], cwd=Path(programs.__file__).parent)
    deadline = time.monotonic() + 60
    while len(processes_with(f"{name}-part")) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    engine.kill()
    engine.wait()
    while processes_with(name):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_compiler_that_takes_too_long_is_ended_with_all_that_it_has_started(tmp_path: Path) -> None:
    name = f"slow-{os.getpid()}"
    script(tmp_path / f"{name}-part", "sleep 100; exit 0")
    began = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        programs.run(["/bin/sh", "-c", f'"{tmp_path}/{name}-part" & sleep 100'], seconds=1)
    while processes_with(f"{name}-part"):
        assert time.monotonic() - began < 60
        time.sleep(0.05)


@pytest.fixture(scope="module")
def in_parts(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    """A compiler that compiles a source only once: of a changed copy, only what was changed."""
    parts = tmp_path_factory.mktemp("parts")

    def compile_library(compiler: Path, sources: Sequence[Path], options: Sequence[str], library: Path) -> None:
        headers = b"".join(path.read_bytes() for path in sorted(sources[0].parent.glob("*.h")))
        compiled = []
        for source in sources:
            digest = hashlib.sha256(headers + source.read_bytes()).hexdigest()
            compiled.append(parts / f"{source.stem}-{digest}.o")
            if not compiled[-1].exists():
                command = [compiler, *UNOPTIMISED, *options, "-c", source, "-o", compiled[-1]]
                subprocess.run([word for word in command if word != "-shared"], check=True)
        subprocess.run([compiler, *UNOPTIMISED, *compiled, "-o", library], check=True)

    return compile_library


@pytest.fixture(scope="module")
def basic(tmp_path_factory: pytest.TempPathFactory, in_parts: Callable[..., None]) -> Path:
    """A library for a CPU without special instructions."""
    needs_a_compiler()
    folder = tmp_path_factory.mktemp("basic")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("motet_kernels.cpp.builder.cpu_flags", lambda: BASIC)
        patch.setattr("motet_kernels.cpp.compiler.OPTIONS", UNOPTIMISED)
        patch.setattr("motet_kernels.cpp.builder.compile_library", in_parts)
        build(folder)
    (path,) = folder.glob("basic-*.so")
    return path


@pytest.fixture
def compiled_in_parts(in_parts: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    needs_a_compiler()
    monkeypatch.setattr("motet_kernels.cpp.builder.compile_library", in_parts)


@pytest.fixture
def quick(basic: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that is done at once, because these sources were compiled before."""
    monkeypatch.setattr(
        "motet_kernels.cpp.builder.compile_library", lambda *arguments: shutil.copyfile(basic, arguments[-1])
    )


def test_a_cache_that_another_architecture_shares_is_not_fought_over(
    cache: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both may have a compiler of the same name and version, and only the basic instructions."""
    build(cache)
    monkeypatch.setattr("platform.machine", lambda: "another")
    assert build(cache).seconds > 0
    assert len(libraries(cache)) == 2


def test_a_read_only_cache_that_has_the_library_serves(cache: Path, quick: None) -> None:
    build(cache)
    cache.chmod(0o500)
    with bound_by_permissions():
        assert build(cache).seconds == 0
    cache.chmod(0o700)


def test_libraries_that_nobody_has_used_for_long_are_removed_and_nothing_else(cache: Path, quick: None) -> None:
    build(cache)
    (ours,) = libraries(cache)
    old, new, notes, text = (
        f"avx2-{'a' * 24}.so",
        f"avx512-bf16-{'b' * 24}-{'c' * 64}.so",
        "notes.so",
        f"avx2-{'a' * 24}.txt",
    )
    for name, age in ((old, 31), (new, 29), (notes, 31), (text, 31), (ours.name, 31)):
        (cache / name).touch()
        os.utime(cache / name, (time.time() - age * 86400,) * 2)
    assert build(cache).seconds == 0
    assert {path.name for path in cache.iterdir()} == {ours.name, mark_of(ours).name, new, notes, text}
    assert ours.stat().st_mtime > time.time() - 3600, "it is in use"


def test_a_library_that_another_process_removes_while_it_is_looked_at_is_made_again(
    cache: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(cache)
    (ours,) = libraries(cache)
    load, calls = builder.Library, []

    def removed_first(path: Path) -> builder.Library:
        calls.append(path)
        if len(calls) == 1:
            ours.unlink()
        return load(path)

    monkeypatch.setattr(builder, "Library", removed_first)
    moved = cache.parent / "moved"  # this process would find the loaded library again at its old path
    cache.rename(moved)
    ours = moved / ours.name
    assert build(moved).seconds > 0
    assert ours.exists()


@pytest.fixture
def installed(tmp_path: Path, cache: Path, quick: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Libraries as an image has them, in a process that finds no compiler."""
    folder = tmp_path / "environment" / "motet-kernels"
    monkeypatch.setattr("motet_kernels.cpp.builder.instruction_sets", lambda *_: [*INSTRUCTION_SETS[-1:]])
    (made,) = builder.install(folder)
    assert made.name.startswith("basic-")
    monkeypatch.setenv("PATH", "/nowhere")
    return folder


def test_libraries_that_came_with_the_installation_need_no_compiler_and_no_cache(installed: Path, cache: Path) -> None:
    built = build(cache, installed=installed)
    assert (built.instructions, built.seconds, built.library.lanes) == ("basic", 0.0, 4)
    assert not cache.parent.exists()


@pytest.mark.parametrize(
    "wrong",
    [
        "damaged",
        "lacks an instruction",
        "others may write",
        "of another version",
        "for other instructions",
        "for a newer libc",
    ],
)
def test_an_installed_library_that_does_not_serve_is_told_with_what_is_missing_instead(
    wrong: str, installed: Path, cache: Path, tmp_path: Path
) -> None:
    (library,) = libraries(installed)
    says = "nobody else may write to it"
    if wrong == "damaged":
        library.write_bytes(b"not a library")
        says = "invalid ELF header|file too short"
    elif wrong == "lacks an instruction":
        compile_trap(tmp_path / "trap.cpp", library)
        says = "its test ended with status -"
    elif wrong == "of another version":
        library.rename(installed / f"basic-{'0' * 24}.so")
        says = f"basic: the library in {installed} is of another version"
    elif wrong == "for other instructions":
        library.rename(installed / f"avx2-{'0' * 24}.so")
        says = f"basic: {installed} has no library for these instructions"
    elif wrong == "for a newer libc":
        content = library.read_bytes()
        (newest, *_) = sorted(re.findall(rb"GLIBC_2\.(\d\d)\0", content), reverse=True)
        library.write_bytes(content.replace(b"GLIBC_2." + newest, b"GLIBC_9." + newest))
        says = "version `GLIBC_9.*' not found"
    else:
        installed.chmod(0o777)
    with pytest.raises(CannotBuild, match=rf"({says}).*; there is no compiler") as refused:
        build(cache, installed=installed)
    assert "\n" not in str(refused.value)


def test_a_wheels_library_serves_wherever_the_wheel_may_be_used(
    installed: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may write into the folder may change the modules, too: some systems let the group do that."""
    installed.chmod(0o775)
    monkeypatch.setattr(builder, "INSTALLED", tmp_path / "none")
    monkeypatch.setattr(builder, "PACKAGED", installed)
    assert build(cache).instructions == "basic"


def compile_trap(source: Path, library: Path) -> None:
    """A library with an instruction that no CPU has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", os.defpath)
        compiler = needs_a_compiler()
        source.write_text('extern "C" long motet_lanes() { __builtin_trap(); }')
        subprocess.run([compiler, "-shared", "-fPIC", source, "-o", library], check=True)


def test_an_image_has_a_library_for_each_set_of_instructions_of_its_architecture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert instruction_sets(None) == list(INSTRUCTION_SETS)
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert [one.name for one in instruction_sets(None)] == ["basic"]
    assert instruction_sets(None, "x86_64") == list(INSTRUCTION_SETS)


@pytest.mark.parametrize(
    "settings",
    [
        {"OMP_THREAD_LIMIT": "1", "OMP_NUM_THREADS": "7", "OMP_DYNAMIC": "true"},
        pytest.param({"OMP_NUM_THREADS": "many", "OMP_DYNAMIC": "true"}, marks=pytest.mark.soak),
        pytest.param({"OMP_NUM_THREADS": "64", "OMP_WAIT_POLICY": "passive"}, marks=pytest.mark.soak),
    ],
    ids=lambda settings: ", ".join(f"{name}={value}" for name, value in settings.items()),
)
def test_odd_settings_of_threads_change_no_result(basic: Path, settings: dict[str, str]) -> None:
    command = [sys.executable, "-m", "motet_kernels.cpp", str(basic)]
    ran = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_a_library_passes_its_test_whatever_torchs_default_type_is(library: Library) -> None:
    """Building a model sets it for a moment, on another thread than the one that tests the library."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        for _ in range(3):  # memory that is too small is not seen at once
            check(library)
    finally:
        torch.set_default_dtype(torch.float32)


def test_no_compiler(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CannotBuild, match="no compiler no-such-c"):
        build(cache, "no-such-c++")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(CannotBuild, match=r"no compiler \(c\+\+, g\+\+, clang\+\+\)"):
        build(cache)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            '[ "$1" = --version ] && exit 0; echo "warm up"; echo "x.cpp:1: error: no C++17" >&2; exit 1',
            "error: no C++17",
        ),
        ('[ "$1" = --version ] && exit 0; kill -11 $$', "status -11"),
        ("exit 3", "status 3"),
        ('[ "$1" = --version ] && exit 0; exit 0', "No such file"),
    ],
    ids=["refuses the source", "crashes", "does not run", "writes nothing"],
)
def test_a_broken_compiler(cache: Path, tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(CannotBuild) as refused:
        build(cache, script(tmp_path / "broken", text))
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)
    assert list(cache.glob("*")) == []


ENDED = {
    "it is killed": ("kill -9 $$", "was ended: status -9"),
    "it is ended": ("kill -15 $$", "was ended: status -15"),
    "a part is killed": (
        "echo 'g++: fatal error: Killed signal terminated program cc1plus' >&2; exit 1",
        "was ended: .*: Killed signal",
    ),
    "a part is killed, in another language": (
        '[ "$LC_ALL" = C ] && said=Killed || said=Abgebrochen; echo "g++: fatal error: $said" >&2; exit 1',
        "was ended: .*: Killed",
    ),
    "no memory": ("echo 'cc1plus: out of memory allocating 65536 bytes' >&2; exit 1", "was ended: cc1plus: out of"),
    "no room": ("echo '/tmp/x.s: No space left on device' >&2; exit 1", "No space left"),
    "an allocation fails": ("echo what: std::bad_alloc >&2; kill -6 $$", "bad_alloc"),
    "too slow": ("exec sleep 100", "took more than 1 s"),
}


@pytest.mark.parametrize("how", ENDED)
def test_a_compiler_that_was_ended_leads_to_no_slower_library_and_runs_again_at_the_next_start(
    how: str, cache: Path, basic: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the best instructions alone: for the others it would be done."""
    text, says = ENDED[how]
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    best, others = INSTRUCTION_SETS[1], INSTRUCTION_SETS[-1]
    monkeypatch.setattr(builder, "instruction_sets", lambda _: [best, others])
    if how == "too slow":
        monkeypatch.setattr("motet_kernels.cpp.compiler.COMPILE_SECONDS", 1.0)
    calls = tmp_path / "calls"
    compiler = script(
        tmp_path / "ended",
        f'case "$*" in --version) exit 0;; *-mavx*) echo best >> {calls}; {text};; esac; {copied(basic)}',
    )
    for _ in range(2):
        with pytest.raises(CannotBuild, match=rf"{says}.*\. The next start tries again$") as refused:
            build(cache, compiler)
        assert "\n" not in str(refused.value)
        assert list(cache.iterdir()) == []
    assert calls.read_text() == "best\n" * 2


def test_a_compiler_that_is_too_old_for_the_best_instructions(
    cache: Path, basic: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = frozenset().union(*(one.cpu_flags for one in INSTRUCTION_SETS))
    monkeypatch.setattr("motet_kernels.cpp.builder.cpu_flags", lambda: everything)
    old = script(
        tmp_path / "old",
        f'case "$*" in --version) exit;; *-mavx*) echo "error: unknown option" >&2; exit 1;; esac; {copied(basic)}',
    )
    assert build(cache, old).instructions == "basic"


@pytest.mark.parametrize(
    "change",
    [
        ("add_lora.cpp", ("add_row(y, factors, rank, b,", "add_row(y, factors, rank / 2, b,")),
        pytest.param(
            ("attention.cpp", ("position + 1 - first : 0", "position + 2 - first : 0")), marks=pytest.mark.soak
        ),
        ("attention.cpp", ("total *= fading[0];", "")),
    ],
    ids=["add_lora", "attention to a later token", "attention across blocks"],
)
def test_a_library_with_wrong_results_is_refused(
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    compiled_in_parts: None,
    change: tuple[str, tuple[str, str]],
) -> None:
    file, text = change
    with_source(tmp_path, monkeypatch, file, lambda source: source.replace(*text))
    with pytest.raises(CannotBuild, match=rf"{file.removesuffix('.cpp')} in torch\.float32 is off by"):
        build(cache)
    assert list(cache.iterdir()) == []


def test_a_library_with_instructions_that_the_cpu_lacks_ends_only_its_test(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled_in_parts: None
) -> None:
    with_source(tmp_path, monkeypatch, "library.cpp", lambda text: text.replace("return LANES;", "__builtin_trap();"))
    with pytest.raises(CannotBuild, match="status -"):
        build(cache)


@pytest.mark.parametrize("damage", ["another file", "cut short", "a bit", "a crash that was written so"])
def test_a_damaged_library_is_made_again(cache: Path, quick: None, tmp_path: Path, damage: str) -> None:
    """And ends no process, although its first bytes may be right: this one would end at the first page that lacks."""
    build(cache)
    (path,) = libraries(cache)
    other = tmp_path / "other"  # this process would find the loaded library again at its old path
    other.mkdir(mode=0o700)
    damaged, whole = other / path.name, path.read_bytes()
    says = "its bytes are not those that were written"
    if damage == "another file":
        damaged.write_bytes(b"not a library")
    elif damage == "cut short":
        damaged.write_bytes(whole[:8192])
    elif damage == "a bit":
        damaged.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    else:
        compile_trap(tmp_path / "trap.cpp", tmp_path / "trap.so")
        name = path.name.rpartition("-")[0] + ".so"
        damaged = other / builder.with_digest(name, tmp_path / "trap.so")
        shutil.copyfile(tmp_path / "trap.so", damaged)
        says = "its test ended with status -"
    again = build(other)
    assert again.seconds > 0
    assert again.damaged.startswith(f"{damaged.name}: {says}")
    assert [one.name for one in libraries(other)] == [path.name]
    assert (build(other).seconds, build(other).damaged) == (0, "")


def test_a_library_that_can_be_linked_no_more_is_made_again(cache: Path, quick: None, tmp_path: Path) -> None:
    """It has passed its test, and then what it links to was replaced by an older version."""
    compiler = needs_a_compiler()
    build(cache)
    (path,) = libraries(cache)
    needed, unlinked = tmp_path / "libneeded.so", tmp_path / "unlinked.so"
    shared = [compiler, "-shared", "-fPIC", "-x", "c++", "-"]
    subprocess.run([*shared, "-o", needed], input=b'extern "C" int added() { return 1; }', check=True)
    text = b'extern "C" int added(); extern "C" int motet_lanes() { return added(); }'
    subprocess.run([*shared, "-x", "none", needed, "-o", unlinked], input=text, check=True)
    old = cache / builder.with_digest(f"{path.name.rpartition('-')[0]}.so", unlinked)
    path.unlink()
    shutil.copyfile(unlinked, old)
    mark = PassedMark(old)
    mark.take()
    mark.put()
    needed.unlink()
    again = build(cache)
    assert "it cannot be read: " in again.damaged
    assert (again.seconds > 0, libraries(cache)) == (True, [path])


def test_what_replaces_a_library_during_its_test_has_not_passed(tmp_path: Path) -> None:
    library = tmp_path / "a.so"
    library.write_bytes(b"tested")
    mark = PassedMark(library)
    mark.take()
    library.write_bytes(b"another")
    mark.put()
    assert not PassedMark(library).take()
    library.write_bytes(b"tested")
    mark.put()
    assert PassedMark(library).take()


def without_room(how: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """For the test of a library, from now on → what is said of it"""
    shell, error, says = {
        "it is killed": ("kill -9 $$", None, "its test ended with status -9"),
        "it is too slow": ("exec /bin/sleep 100", None, "it took more than 1 s"),
        "it gets no memory in C++": ("echo what: std::bad_alloc >&2; kill -6 $$", None, "what: std::bad_alloc"),
        "it gets no memory": ("echo MemoryError: none left >&2; exit 1", None, "MemoryError: none left"),
        "no process": ("", OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)), "Resource temporarily unavailable"),
        "too many files": ("", None, "Too many open files"),
    }[how]
    run = programs.run

    def instead(_: Sequence[str], *, seconds: float) -> object:
        if error is not None:
            raise error
        return run(["/bin/sh", "-c", shell], seconds=seconds)

    def unread(path: Path) -> str:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    monkeypatch.setattr(builder, "run", instead)
    monkeypatch.setattr(builder, "TEST_SECONDS", 1.0)
    monkeypatch.setattr(builder, "passed", set())
    if how == "too many files":
        monkeypatch.setattr(builder, "_digest_of", unread)
    return rf"^{INSTRUCTION_SETS[-1].name}-[^ ]*\.so could not be tested: {says}\. The next start tries again$"


def test_a_library_whose_test_aborts_is_made_again(cache: Path, quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    build(cache)
    aborts = ["echo '*** stack smashing detected ***: terminated' >&2; kill -6 $$"]
    run = programs.run

    def abort_once(command: Sequence[str], *, seconds: float) -> object:
        return run(["/bin/sh", "-c", aborts.pop()] if aborts else command, seconds=seconds)

    monkeypatch.setattr(builder, "run", abort_once)
    forget_what_passed(cache)
    assert build(cache).damaged.endswith("*** stack smashing detected ***: terminated")


FAILS_HERE = {
    "an exception of Python": (TypeError("an unexpected argument"), "could not be tested: TypeError: an unexpected"),
    "a name that torch lacks": (AttributeError("torch has no such name"), "could not be tested: AttributeError: torch"),
    "no code of this folder": (
        OSError("{path}: failed to map segment from shared object: Operation not permitted"),
        "could not be tested: failed to map segment",
    ),
    "no place for its threads": (
        OSError("{path}: cannot allocate memory in static TLS block"),
        "could not be tested: cannot allocate memory in static",
    ),
    "wrong numbers": (
        SelfTestFailed("linear is off by 3"),
        "failed its test in this process, and passed it in another: linear is off by 3",
    ),
    "a function is gone": (
        AttributeError("{path}: undefined symbol: motet_lanes"),
        "failed its test in this process, and passed it in another: it lacks a function: .*undefined symbol",
    ),
}


@pytest.mark.parametrize("how", FAILS_HERE)
def test_a_library_that_passed_its_test_and_fails_in_this_process_is_kept(
    how: str, cache: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not used, and nothing is compiled: the same sources and compiler give the same bytes."""
    build(cache)
    (kept,) = libraries(cache)
    error, says = FAILS_HERE[how]
    calls: list[object] = []

    def fail(_: object) -> None:
        raise type(error)(str(error).format(path=kept))

    with monkeypatch.context() as patch:
        at_loading = isinstance(error, OSError) or how == "a function is gone"
        patch.setattr(builder, "Library" if at_loading else "check", fail)
        patch.setattr(builder, "compile_library", lambda *arguments: calls.append(arguments))
        with pytest.raises(CannotBuild, match=rf"^{kept.name} {says}.*\. The next start tries again$"):
            build(cache)
    assert (calls, libraries(cache)) == ([], [kept])
    assert build(cache).seconds == 0


def test_a_library_without_one_of_its_functions_is_wrong(tmp_path: Path) -> None:
    source, library = tmp_path / "empty.cpp", tmp_path / "empty.so"
    source.write_text('extern "C" long motet_lanes() { return 4; }')
    subprocess.run([needs_a_compiler(), "-shared", "-fPIC", source, "-o", library], check=True)
    with pytest.raises(SelfTestFailed, match=r"it lacks a function: .*motet_failure"):
        builder.checked(library)


def test_where_linux_refuses_tiles_their_library_is_kept_and_not_compiled(
    cache: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other processes on this cache may have them."""
    tiles, basic = INSTRUCTION_SETS[0], INSTRUCTION_SETS[-1]
    monkeypatch.setattr(builder, "instruction_sets", lambda _: [tiles, basic])
    for allowed in (True, False, False, True):
        monkeypatch.setattr(builder, "tiles_allowed", lambda allowed=allowed: allowed)
        one = build(cache)
        names = sorted(path.name.partition("-")[0] for path in libraries(cache))
        if allowed:
            assert (one.instructions, one.skipped) == ("amx-bf16", "")
        else:
            assert (one.instructions, names) == ("basic", ["amx", "basic"])
            assert one.skipped == "amx-bf16: Linux does not give this process the CPU's tiles (AMX)"
    assert one.seconds == 0


def test_why_faster_kernels_do_not_serve_is_told(cache: Path, quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "instruction_sets", lambda _: [INSTRUCTION_SETS[1], INSTRUCTION_SETS[-1]])
    build_one = builder._build  # noqa: SLF001

    def wrong_at_first(*arguments: Any) -> object:
        if arguments[-1] is INSTRUCTION_SETS[1]:
            raise SelfTestFailed("linear is off by 3")
        return build_one(*arguments)

    monkeypatch.setattr(builder, "_build", wrong_at_first)
    one = build(cache)
    assert (one.instructions, one.skipped) == ("basic", "avx512-bf16: linear is off by 3")


REFUSE = """
import ctypes
class Step(ctypes.Structure):
    _fields_ = [(name, kind) for name, kind in zip(("code", "yes", "no", "number"), (ctypes.c_uint16, ctypes.c_uint8,
                ctypes.c_uint8, ctypes.c_uint32))]
class Filter(ctypes.Structure):
    _fields_ = [("steps", ctypes.c_uint16), ("first", ctypes.POINTER(Step))]
steps = (Step * 6)((0x20, 0, 0, 0), (0x15, 0, 3, 158), (0x20, 0, 0, 16), (0x15, 0, 1, 0x1023), (6, 0, 0, 0x50001),
                   (6, 0, 0, 0x7FFF0000))
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, ctypes.byref(Filter(6, steps))) == 0
"""
"""A filter of system calls: a process may not ask for tiles."""


def test_a_process_knows_whether_linux_gives_it_tiles() -> None:
    ask = f"import runpy; print(runpy.run_path({amx_permission.__file__!r})['tiles_allowed']())"
    said = [
        subprocess.run([sys.executable, "-ISc", script], check=True, capture_output=True, text=True).stdout
        for script in (ask, REFUSE + ask)
    ]
    assert said == [f"{'amx_tile' in cpu_flags()}\n", "False\n"]


NO_ROOM = [
    "it is killed",
    "it gets no memory in C++",
    "it is too slow",
    "it gets no memory",
    "no process",
    "too many files",
]


@pytest.mark.parametrize("how", NO_ROOM)
def test_a_library_that_cannot_be_tested_now_is_kept_and_not_made_again(
    how: str, cache: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(cache)
    kept = [(path, path.stat().st_mtime_ns) for path in libraries(cache)]
    forget_what_passed(cache)
    monkeypatch.setattr(builder, "run", lambda command, **_: subprocess.CompletedProcess(command, 0, "", ""))
    with monkeypatch.context() as patch:
        with pytest.raises(CannotBuild, match=without_room(how, patch)):
            build(cache)
        assert [(path, path.stat().st_mtime_ns) for path in libraries(cache)] == kept
    assert build(cache).seconds == 0


@pytest.mark.parametrize("how", NO_ROOM)
def test_no_slower_library_serves_where_an_installed_one_cannot_be_tested_now(
    how: str, installed: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.raises(CannotBuild, match=without_room(how, patch)):
        build(cache, installed=installed)
    assert build(cache, installed=installed).seconds == 0


def test_a_library_is_on_the_disk_before_it_has_its_name(
    cache: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[str, int]] = []
    sync = os.fsync

    def noted(descriptor: int) -> None:
        synced.append((str(Path(f"/proc/self/fd/{descriptor}").readlink()), len(list(cache.glob("*.so")))))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    build(cache)
    (file, named), (folder, named_then) = synced
    assert (Path(file).parent.parent, named) == (cache, 0)
    assert (Path(folder), named_then) == (cache, 1)


def test_a_cache_that_cannot_be_written(cache: Path) -> None:
    needs_a_compiler()
    cache.parent.mkdir()
    cache.parent.chmod(0o500)
    with bound_by_permissions(), pytest.raises(CannotBuild, match="kernels cannot be used: Permission denied"):
        build(cache)
    cache.parent.chmod(0o700)
    cache.parent.rmdir()
    cache.parent.write_text("a file")
    with pytest.raises(CannotBuild, match="cannot be used"):
        build(cache)


def test_a_cache_that_others_may_write_to_is_refused(cache: Path) -> None:
    needs_a_compiler()
    cache.mkdir(parents=True)
    cache.chmod(0o770)
    with pytest.raises(CannotBuild, match="nobody else may write"):
        build(cache)


def test_what_a_killed_build_has_left_is_removed_later(cache: Path, quick: None) -> None:
    for name, age in (("build-old", ABANDONED_SECONDS + 60), ("build-now", 0)):
        (cache / name).mkdir(parents=True)
        os.utime(cache / name, (time.time() - age,) * 2)
    (cache / "build-gone").symlink_to("nowhere")  # as one that goes between two looks at it
    cache.chmod(0o700)
    build(cache)
    assert sorted(path.name for path in cache.iterdir() if path.is_dir()) == ["build-now"]


def test_of_a_long_output_the_line_with_the_error_is_told() -> None:
    assert first_error("In file x\nx.cpp:3:1: error: unknown type\nnote: here\n") == "x.cpp:3:1: error: unknown type"
    assert first_error("Killed\n") == "Killed"
    assert not first_error("")
