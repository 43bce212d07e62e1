"""The real command in a process of its own, where nothing has to be up."""

import hashlib
import json
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path

import pytest

from motet.errors import SetupError
from motet_cli.chat import Conversation, chat
from motet_cli.why import why
from motet_operator.local.state_directory import StateDirectory
from testbed.local_stack import MOTET, copy_of_bundled, write_adapter
from tests.support.forked_motet import in_an_interpreter_of_its_own, motet
from tests.support.small_disk import small_disk


def refused(*arguments: str, env: dict[str, str] | None = None) -> str:
    """What `motet up` says when it starts nothing."""
    done = motet("up", *arguments, env=env)
    assert done.returncode == 2, done.stderr
    return done.stderr


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield int(holder.getsockname()[1])


def test_motet_version_prints_the_version() -> None:
    assert motet("version", start=in_an_interpreter_of_its_own).stdout == f"motet {version('motet')}\n"


def test_without_a_command_help_is_printed() -> None:
    said = motet().stdout
    assert all(command in said for command in ("up", "down", "status", "chat", "adapter", "version"))


def test_the_commands_of_adapters_are_listed() -> None:
    said = motet("adapter", "--help").stdout
    assert all(f" {command} " in said for command in ("check", "ls", "show", "push", "rm"))


def test_a_port_in_use_is_named_with_what_to_do(tmp_path: Path, taken: int) -> None:
    said = refused("--data-dir", str(tmp_path), "--port", str(taken))
    assert (
        f"port {taken} on 127.0.0.1 is in use (Address already in use). Free it, or choose another one with --port"
        in said
    )


def test_a_failed_start_leaves_no_run_folder_and_no_socket_folder(tmp_path: Path, taken: int) -> None:
    before = set(Path("/tmp").glob("motet-*"))
    deep = tmp_path / ("d" * 60)
    refused("--data-dir", str(deep), "--port", str(taken), env={"XDG_RUNTIME_DIR": ""})
    assert not (deep / "run").exists()
    key = hashlib.sha256(os.fsencode(deep)).hexdigest()[:12]
    assert not [path for path in set(Path("/tmp").glob("motet-*")) - before if path.name.endswith(key)]


def test_a_host_of_another_machine_is_named(tmp_path: Path) -> None:
    assert "MOTET_HOST=no.such.host is not an address" in refused(
        "--data-dir", str(tmp_path), env={"MOTET_HOST": "no.such.host"}
    )


def test_a_foreign_host_is_not_reported_as_a_port_in_use(tmp_path: Path) -> None:
    said = refused("--data-dir", str(tmp_path), env={"MOTET_HOST": "192.0.2.1"})
    assert "MOTET_HOST=192.0.2.1 is not an address of this machine" in said


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert f"{tmp_path}/none does not exist. Give -f a folder of manifests." in refused(
        "--data-dir", str(tmp_path / "d"), "-f", str(tmp_path / "none")
    )


@pytest.mark.parametrize(("name", "why_not"), [("~nobody-of-that-name/x", "home"), ("/" + "x" * 300, "name too long")])
def test_a_folder_of_which_nothing_can_tell_is_named(name: str, why_not: str, tmp_path: Path) -> None:
    said = refused("--data-dir", str(tmp_path / "d"), "-f", name)
    assert f"{name} can't be read: " in said
    assert why_not in said


def test_what_is_neither_a_folder_nor_a_file_is_named(tmp_path: Path) -> None:
    """A pipe: `motet up -f <(…)`. It could not be watched."""
    os.mkfifo(pipe := tmp_path / "pipe")
    said = refused("--data-dir", str(tmp_path / "d"), "-f", str(pipe))
    assert f"{pipe}: Not a directory. Give -f a folder of manifests, or a file." in said


def test_wrong_yaml_is_shown_with_its_places(tmp_path: Path) -> None:
    folder = copy_of_bundled(tmp_path / "m", adapters=[])
    (folder / "wrong.yaml").write_text("apiVersion: motet.dev/v1alpha1\nkind: LoraAdapter\n---\na: [\n")
    said = refused("--data-dir", str(tmp_path / "d"), "-f", str(folder))
    assert f"{folder}/wrong.yaml:2:7: kind: must be one of LoRAAdapter, ServingPool, " in said
    assert f"{folder}/wrong.yaml:5:1: is not YAML: did not find expected node content" in said
    assert f"2 problems in {folder}; nothing was started." in said


def test_a_folder_without_a_pool_has_nothing_to_serve(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    write_adapter(folder, "legal", uri="file://legal")
    assert f"{folder} declares no ServingPool" in refused("--data-dir", str(tmp_path / "d"), "-f", str(folder))


def test_a_missing_model_folder_is_named_with_its_line(tmp_path: Path) -> None:
    folder = copy_of_bundled(tmp_path / "m", adapters=[])
    (folder / "model").unlink()
    said = refused("--data-dir", str(tmp_path / "d"), "-f", str(folder), "--port", "0", "--detach")
    assert f"ServingPool default/demo: the model folder {folder}/model does not exist." in said
    assert not (tmp_path / "d" / "run").exists(), "what was started has been cleared away"


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json"])
def test_a_missing_file_of_a_model_folder_is_named(tmp_path: Path, missing: str) -> None:
    folder = copy_of_bundled(tmp_path / "m", adapters=[])
    model = (folder / "model").readlink()
    (folder / "model").unlink()
    (folder / "model").mkdir()
    for file in model.iterdir():
        if file.name != missing:
            (folder / "model" / file.name).symlink_to(file)
    said = refused("--data-dir", str(tmp_path / "d"), "-f", str(folder), "--port", "0", "--detach")
    assert f"ServingPool default/demo: the model folder {folder}/model has no {missing}." in said


def test_a_state_directory_below_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = refused("--data-dir", str(tmp_path / "file" / "d"))
    assert f"cannot use the state directory {tmp_path}/file/d: Not a directory." in said
    assert "--data-dir" in said


@pytest.fixture
def small_file_system(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "32k") as disk:
        yield disk


def test_a_full_disk_is_reported_before_anything_starts(small_file_system: Path) -> None:
    said = refused("--data-dir", str(small_file_system / "d"), "--port", "0")
    assert f"cannot write to the state directory {small_file_system}/d: No space left on device." in said


def test_down_works_with_a_full_disk(small_file_system: Path) -> None:
    with suppress(OSError), (small_file_system / "fill").open("wb", buffering=0) as fill:
        while True:
            fill.write(bytes(4096))
    assert motet("down", "--data-dir", str(small_file_system)).returncode == 0


def test_a_setting_out_of_bounds_is_named(tmp_path: Path) -> None:
    said = refused("--data-dir", str(tmp_path), env={"MOTET_TIME_SCALE": "7"})
    assert "MOTET_TIME_SCALE is '7': Input should be less than or equal to 1." in said


def test_without_a_stack_status_says_so(tmp_path: Path) -> None:
    done = motet("status", "--data-dir", str(tmp_path), "--json")
    assert done.returncode == 1
    nothing = {"services": [], "pools": [], "adapters": [], "runners": [], "problems": [], "url": ""}
    assert json.loads(done.stdout) == nothing | {"answers": [], "weights_made": None}
    assert f"Motet is not running (state directory {tmp_path})" in done.stderr


@pytest.mark.parametrize("exists", [True, False])
def test_down_without_a_stack_is_no_error(tmp_path: Path, exists: bool) -> None:
    folder = tmp_path if exists else tmp_path / "none"
    done = motet("down", "--data-dir", str(folder))
    assert (done.returncode, done.stdout) == (0, f"Motet is not running (state directory {folder}).\n")
    assert folder.exists() == exists


def test_chat_without_a_stack_says_how_to_start_one(tmp_path: Path, taken: int) -> None:
    done = motet("chat", "--data-dir", str(tmp_path), "-m", "hello")
    assert done.returncode == 2
    assert f"Motet is not running (state directory {tmp_path}). Start it with `motet up`" in done.stderr


def test_chat_with_a_url_where_nobody_listens_says_so() -> None:
    done = motet("chat", "--url", "http://127.0.0.1:1", "-m", "hello")
    assert done.returncode == 2
    assert "no answer from http://127.0.0.1:1" in done.stderr


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Its URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


class Listing(BaseHTTPRequestHandler):
    """A gateway that lists a broken adapter first, and says who is asked."""

    def do_GET(self) -> None:
        models = [{"id": "broken", "state": "failed"}, {"id": "working", "state": "cold"}]
        self._answer("application/json", json.dumps({"data": models}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        event = json.dumps({"choices": [{"delta": {"content": f"this is {body['model']}"}}]})
        self._answer("text/event-stream", f"data: {event}\n\ndata: [DONE]\n\n")

    def _answer(self, kind: str, text: str) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None: ...


def test_chat_without_a_model_takes_one_that_answers() -> None:
    with serving(Listing) as url:
        done = motet("chat", "--url", url, "-m", "hello")
    assert (done.returncode, done.stdout) == (0, "this is working\n")


class BreakingOff(Listing):
    def do_POST(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("content-length", "100000")
        self.end_headers()
        self.wfile.write(b'data: {"choices": [{"delta": {"content": "half an"}}]}\n\n')
        self.close_connection = True


def test_chat_reports_a_broken_answer_on_its_own_line() -> None:
    with serving(BreakingOff) as url:
        done = motet("chat", "any", "--url", url, "-m", "hello")
    assert (done.returncode, done.stdout) == (2, "half an\n")
    assert "Is Motet running?" in done.stderr


class NoGateway(Listing):
    """Something else listens there, or is between."""

    said = "<html>"

    def do_GET(self) -> None:
        self._answer("application/json", self.said)

    def do_POST(self) -> None:
        self._answer("text/event-stream", self.said)


@pytest.mark.parametrize("model", ["", "any"])
@pytest.mark.parametrize(
    "said", ["<html>", "[]", '{"data": 1}', "data: <html>\n\n", "data: []\n\n", "data: {}\n\n", ""]
)
def test_chat_with_something_else_at_the_url_says_so(
    model: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(NoGateway, "said", said)
    with serving(NoGateway) as url:
        status = chat(Path("nowhere"), url=url, message="hello", conversation=Conversation(model))
    assert status == 1
    assert "Is a gateway of Motet at this URL? Name one with --url." in capsys.readouterr().err


def why_document(**line: object) -> str:
    """Of a request with one line in its timeline"""
    timeline = [{"seconds": 0.0, "lasted": 0.1, "by": "gateway", "event": "received", "detail": ""} | line]
    names = ("http_id", "model", "status", "gateway", "scheduler", "first_token_seconds")
    document = dict.fromkeys(names) | {"id": "x", "tenant": "acme", "seconds": 1.0, "ended": True}
    return json.dumps(document | {"timeline": timeline, "choices": []})


@pytest.mark.parametrize(
    "said",
    ["<html>", "[]", "{}", "", '{"choices": []}', '{"choices": 3}', why_document(by=3), why_document(event=None)],
)
def test_why_with_something_else_at_the_url_says_so(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NoGateway, "said", said)
    refusal = pytest.raises(SetupError, match=r"Is a gateway of Motet at this URL\? Name one with --url\.")
    with serving(NoGateway) as url, refusal:
        why(Path("nowhere"), "x", url=url, as_json=False)


@pytest.mark.parametrize(
    "said",
    [
        "<html>",
        "{}",
        '{"tokens": 3}',
        '{"tokens": ["a"], "token_strs": ["a"], "max_model_len": 9, "parent": null, "tenant": null, "digest": null}',
        '{"tokens": [1], "token_strs": ["a"], "max_model_len": 9.5, "parent": null, "tenant": null, "digest": null}',
        '{"tokens": [1], "token_strs": ["a"], "max_model_len": 9, "parent": null, "tenant": null, "digest": 1}',
    ],
)
def test_an_estimate_needs_the_answer_of_a_gateway(said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NoGateway, "said", said)
    layout = StateDirectory.of(tmp_path)
    with serving(NoGateway) as url:
        layout.status.write_text(json.dumps({"url": url}))
        done = motet("predict", "try", "hello", "--adapter", "any", "--data-dir", str(tmp_path))
    assert done.returncode == 2
    assert "the answer cannot be read. Is a gateway of Motet at this URL? See `motet status`." in done.stderr


class Garbled(Listing):
    """Says that its answers are compressed, which they are not."""

    def end_headers(self) -> None:
        self.send_header("content-encoding", "gzip")
        super().end_headers()


@pytest.mark.parametrize("command", [("why", "x"), ("chat", "-m", "hello"), ("chat", "any", "-m", "hello")])
def test_an_answer_that_is_not_what_its_headers_say_is_none(command: tuple[str, ...]) -> None:
    with serving(Garbled) as url:
        done = motet(*command, "--url", url)
    assert done.returncode == 2
    assert f"no answer from {url}" in done.stderr


@pytest.mark.parametrize("command", [("why", "x"), ("chat", "any", "-m", "hello")])
@pytest.mark.parametrize(
    "url",
    [
        "http://[::1",
        "http://localhost:port",
        "http://localhost:99999",
        f"http://{'a' * 64}",
        "localhost:8000",
        "ftp://localhost",
    ],
)
def test_what_is_no_url_is_named_by_its_option(command: tuple[str, ...], url: str) -> None:
    done = motet(*command, "--url", url)
    assert done.returncode == 2
    assert f"--url '{url}' is not a URL" in done.stderr


@pytest.mark.parametrize("port", [1, 99999])
def test_a_password_in_a_url_is_not_printed(port: int) -> None:
    done = motet("why", "x", "--url", f"http://user:secret@127.0.0.1:{port}")
    assert done.returncode == 2
    assert f"http://127.0.0.1:{port}" in done.stderr
    assert "secret" not in done.stderr


@pytest.mark.parametrize(
    "command", [("why", "x"), ("chat", "any", "-m", "hello"), ("predict", "try", "hello", "--adapter", "any")]
)
def test_what_is_no_url_in_the_status_file_is_named_there(command: tuple[str, ...], tmp_path: Path) -> None:
    status = StateDirectory.of(tmp_path).status
    status.write_text(json.dumps({"url": "http://localhost:99999"}))
    done = motet(*command, "--data-dir", str(tmp_path))
    assert done.returncode == 2
    assert f"'http://localhost:99999' in {status} is not a URL" in done.stderr
    assert "--url" not in done.stderr


@pytest.mark.parametrize("field", ["TEXT", "--adapter", "--tenant"])
def test_an_estimate_of_what_is_not_utf8_is_refused_by_its_field(field: str, tmp_path: Path) -> None:
    given = {"TEXT": "hello", "--adapter": "any", "--tenant": "acme"} | {field: os.fsdecode(b"a\xff")}
    options = ("--adapter", given["--adapter"], "--tenant", given["--tenant"])
    done = motet("predict", "try", given["TEXT"], *options, "--data-dir", str(tmp_path))
    assert done.returncode == 2
    assert f"{field} is not UTF-8" in done.stderr


def test_text_that_is_not_utf8_is_not_sent() -> None:
    nowhere, text = ("--url", "http://127.0.0.1:1"), os.fsdecode(b"a\xff")
    for command in (("any", "-m", text), (text, "-m", "hello")):
        done = motet("chat", *command, *nowhere)
        assert done.returncode == 1
        assert "is not UTF-8 and was not sent" in done.stderr
    assert "no answer from" in motet("why", text, *nowhere).stderr


def test_output_that_finds_no_space_is_an_error_of_one_line(tmp_path: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        command = [*MOTET, "status", "--json", "--data-dir", str(tmp_path)]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    said = "motet: cannot write the output: No space left on device. Free some space.\n"
    assert (done.returncode, done.stderr) == (2, said)


def test_chat_refuses_a_temperature_that_no_gateway_takes() -> None:
    done = motet("chat", "any", "--url", "http://127.0.0.1:1", "-m", "hello", "--temperature", "nan")
    assert done.returncode == 2
    assert "--temperature" in done.stderr


class RefusingSome(Listing):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        said = body["messages"][-1]["content"]
        if said.startswith("no"):
            text = json.dumps({"error": {"message": f"We do not answer [/x] \x1b[2J {said}."}}).encode()
            self.send_response(400)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)
        else:
            event = json.dumps({"choices": [{"delta": {"content": f"to {said}"}}]})
            self._answer("text/event-stream", f"data: {event}\n\ndata: [DONE]\n\n")


@pytest.mark.parametrize(
    ("typed", "status", "printed", "refused"),
    [
        ("one\n\n \n\ntwo\n", 0, "to one\nto two\n", 0),
        ("one\n\ntwo", 0, "to one\nto two\n", 0),
        ("\n", 0, "", 0),
        ("", 0, "", 0),
        ("no\n\ntwo\nno more\n", 1, "to two\n", 2),
        ("no\n/quit\ntwo\n", 1, "", 1),
    ],
)
def test_a_piped_chat_ends_with_its_input_and_reports_refusals(
    typed: str, status: int, printed: str, refused: int
) -> None:
    with serving(RefusingSome) as url:
        done = motet("chat", "any", "--url", url, typed=typed)
    assert (done.returncode, done.stdout) == (status, printed)
    assert done.stderr.count("We do not answer [/x] \\x1b[2J no") == refused


class Wrong(Listing):
    content = ""

    def do_POST(self) -> None:
        self._answer("text/event-stream", 'data: {"choices": [{"delta": {"content": %s}}]}\n\n' % self.content)  # noqa: UP031


@pytest.mark.parametrize("content", ["5", "[]", '["a"]', '"\\ud800"'])
def test_a_piece_that_is_no_text_is_not_an_answer(content: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Wrong, "content", content)
    with serving(Wrong) as url:
        done = motet("chat", "any", "--url", url, "-m", "hello")
    assert done.returncode == 1
    assert "Is a gateway of Motet at this URL? Name one with --url." in done.stderr
    assert "Traceback" not in done.stderr


def test_the_data_dir_follows_the_xdg_rules(tmp_path: Path) -> None:
    done = motet("down", env={"XDG_DATA_HOME": str(tmp_path)})
    assert done.stdout == f"Motet is not running (state directory {tmp_path}/motet).\n"
    done = motet("down", env={"MOTET_DATA_DIR": str(tmp_path / "mine")})
    assert done.stdout == f"Motet is not running (state directory {tmp_path}/mine).\n"


class AskingForAKey(Listing):
    def do_GET(self) -> None:
        if self.headers["authorization"] == f"Bearer {KEY}":
            super().do_GET()
            return
        body = json.dumps({"error": {"message": "This gateway needs an API key."}}).encode()
        self.send_response(401)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


KEY = f"motet_{'0' * 16}_{'a' * 43}"


@pytest.mark.parametrize(
    ("key", "status", "said"),
    [
        (KEY, 0, "this is working\n"),
        (f" {KEY}\n", 0, "this is working\n"),
        ("", 1, "This gateway needs an API key. `motet` takes the key from MOTET_API_KEY.\n"),
        ("two words", 2, "the value of MOTET_API_KEY is not a key: a key has only ASCII characters and no spaces."),
        ("schlüssel", 2, "the value of MOTET_API_KEY is not a key: a key has only ASCII characters and no spaces."),
    ],
)
def test_chat_sends_the_key_of_its_environment(key: str, status: int, said: str) -> None:
    with serving(AskingForAKey) as url:
        done = motet("chat", "--url", url, "-m", "hello", env={"MOTET_API_KEY": key})
    assert done.returncode == status
    assert said in (done.stderr if status else done.stdout)
    assert not key.strip() or key.strip() not in done.stderr
