import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.blocks import Block, NotAsShown, Python, Shell, Step, blocks, matches, type_page


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    folder = tmp_path / "reader"
    folder.mkdir()
    with Shell(folder, scratch=tmp_path, env={"PATH": os.environ["PATH"]}, timeout_s=60) as started:
        yield started


def block(text: str, kind: str = "sh", note: str = "") -> Block:
    return Block(page=Path("page.md"), line=1, kind=kind, text=text, note=note)


def test_a_page_is_parsed_into_blocks_with_their_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Do:\n\n```sh\nls\n```\n\n<!-- not run: no GPU -->\n```sh\nnvidia-smi\n```\n\n```yaml\na: 1\n```\n")
    first, second, third = blocks(page)
    assert (first.text, first.line, first.runs) == ("ls\n", 3, True)
    assert (second.reason_not_to_run, second.runs) == ("no GPU", False)
    assert (third.kind, third.runs) == ("yaml", False)


def test_a_console_block_is_commands_and_what_they_print() -> None:
    steps = block("$ echo a\na\n$ cat <<END\n> b\n> END\nb\n", "console").steps
    assert steps == [Step("echo a", "a"), Step("cat <<END\nb\nEND", "b")]


def test_a_console_block_without_a_command_is_a_mistake() -> None:
    with pytest.raises(ValueError, match=r"begins with a command"):
        _ = block("a\n", "console").steps


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("a  b", "a b", True),
        ("a b", "a c", False),
        ("NAME … AGE", "NAME   READY   AGE", True),
        ("a\n…\nd", "a\nb\nc\nd", True),
        ("a\n…\nd", "a\nd", True),
        ("a\n…", "b\na", False),
        ("a", "a\nb", False),
        ("cost: 1.5 (…)", "cost: 1x5 (now)", False),
        ("", "", True),
        ("", "something", False),
    ],
)
def test_dots_stand_for_anything_and_columns_for_their_words(shown: str, printed: str, *, same: bool) -> None:
    assert matches(shown, printed) is same


def test_a_variable_of_a_block_is_set_in_the_next_one(shell: Shell) -> None:
    shell.run(block('mkdir one\ncd one\nNAME=value\nsay() { echo "$NAME $(basename $PWD)"; }\n'))
    shell.run(block("$ say\nvalue one\n", "console"))


def test_the_first_command_that_fails_ends_a_block(shell: Shell) -> None:
    with pytest.raises(NotAsShown, match=r"(?s)page.md:1: ends with 3.*before"):
        shell.run(block("echo before\n(exit 3)\ntouch after\n"))
    shell.run(block("test ! -e after\n"))


def test_other_output_than_shown_fails(shell: Shell) -> None:
    with pytest.raises(NotAsShown, match=r"(?s)--- shows\none\n--- printed\ntwo"):
        shell.run(block("$ echo two\none\n", "console"))


def test_a_block_that_should_fail_must_fail(shell: Shell) -> None:
    shell.run(block("$ echo no; false\nno\n", "console", note="fails"))
    with pytest.raises(NotAsShown, match=r"is refused on the page, and succeeds"):
        shell.run(block("$ echo no\nno\n", "console", note="fails"))


def test_a_block_that_names_a_file_is_saved(shell: Shell) -> None:
    manifest, program = block("# team/a.yaml\na: 1\n", "yaml"), block("# say.py\nprint(1)\n", "python")
    type_page(
        [manifest, program, block("$ cat team/a.yaml say.py\n# team/a.yaml\na: 1\n# say.py\nprint(1)\n", "console")],
        shell,
    )


def test_python_blocks_share_a_namespace_and_print_what_the_next_block_shows(shell: Shell) -> None:
    page = [block("a = 1\n", "python"), block("print(a)\nprint('at', a)\n", "python"), block("1\nat …\n", "text")]
    type_page(page, shell, Python())


def test_other_python_output_than_shown_fails(shell: Shell) -> None:
    with pytest.raises(NotAsShown, match=r"(?s)page.md:1.*--- shows\n2\n.*--- printed\n1"):
        type_page([block("print(1)\n", "python"), block("2\n", "text")], shell, Python())
    with pytest.raises(NotAsShown, match=r"(?s)--- printed\n1"):
        type_page([block("print(1)\n", "python")], shell, Python())


def test_an_error_in_a_python_block_has_the_line_of_the_page() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        Python().run(block("a = 1\na / 0\n", "python"), shown="")
    assert (caught.traceback[-1].path, caught.traceback[-1].lineno + 1) == ("page.md", 3)


def test_a_command_that_takes_too_long_fails_with_its_output(tmp_path: Path) -> None:
    with (
        Shell(tmp_path, scratch=tmp_path, env={"PATH": os.environ["PATH"]}, timeout_s=2) as shell,
        pytest.raises(NotAsShown, match=r"(?s)not within 2 s.*still 2"),
    ):
        shell.run(block("echo still $((1+1))\nsleep 30\n"))


def test_processes_of_a_block_end_with_the_shell(tmp_path: Path) -> None:
    with Shell(tmp_path, scratch=tmp_path, env={"PATH": os.environ["PATH"]}, timeout_s=60) as shell:
        shell.run(block("sleep 300 &\necho $! > pid\n"))
        pid = int((tmp_path / "pid").read_text())
        assert runs(pid)
    deadline = time.monotonic() + 60
    while runs(pid):
        assert time.monotonic() < deadline


def runs(pid: int) -> bool:
    """A zombie does not."""
    try:
        return "Z (zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
