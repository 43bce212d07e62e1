"""`make clients`: which clients it tries, and that its table says what was seen."""

import re
import socket
import threading
import time
from urllib.parse import urlsplit

import pytest

from tools.clients.breaking import LAST_CHUNK, PIECES, breaking_proxy
from tools.clients.clients import ACTIONS, CLIENTS, Client
from tools.clients.environments import DRIVERS
from tools.clients.results import Tried, read_results, write_results
from tools.reference import clients_page as page


def actions_of(client: Client) -> set[str]:
    """What its driver hands to `serve`"""
    if client.node:
        text = (DRIVERS / client.driver).read_text().partition("const actions = {")[2]
        return {line.split("async ")[1].split("(")[0] for line in text.splitlines() if line.startswith("  async ")}
    text = (DRIVERS / f"{client.driver}.py").read_text().partition('if __name__ == "__main__":')[2]
    return set(re.findall(r'"(\w+)": \w', text))


@pytest.mark.parametrize("name", [name for name, client in CLIENTS.items() if client.driver])
def test_a_driver_has_the_actions_that_the_client_has(name: str) -> None:
    assert actions_of(CLIENTS[name]) == set(CLIENTS[name].does) <= set(ACTIONS)


def test_a_client_is_tried_again_after_its_actions_have_changed() -> None:
    for name, tried in read_results().items():
        assert tried.missing or set(tried.actions) == set(CLIENTS[name].does), f"make clients CLIENTS={name}"


def test_the_page_shows_what_works_what_does_not_and_why(tmp_path, monkeypatch) -> None:
    file = tmp_path / "results.json"
    results = {
        "curl": Tried("8.0", {"list": "", "chat": "it printed\nnothing"}, ""),
        "openai": Tried("", {}, "no network"),
    }
    write_results(results, file)
    assert read_results(file) == results
    monkeypatch.setattr(page, "read_results", lambda: read_results(file))
    shown = page.clients_page()
    assert "| curl | 8.0 | yes | **no** |" in shown
    assert "- curl, chat: it printed nothing" in shown
    assert "| OpenAI, Python | not installable |" in shown
    assert "- OpenAI, Python: no network" in shown


@pytest.mark.parametrize("pieces", [PIECES, 50])
def test_a_stream_breaks_and_a_short_answer_does_not(pieces: int) -> None:
    answer = b"HTTP/1.1 200 OK\r\n\r\n" + b"data: x\n\n" * pieces * 200

    def serve(server: socket.socket) -> None:
        end, _ = server.accept()
        with end:
            end.recv(100)
            end.sendall(answer if pieces > PIECES else answer[:25])

    with socket.create_server(("127.0.0.1", 0)) as server, breaking_proxy(server.getsockname()[1]) as url:
        threading.Thread(target=serve, args=(server,), daemon=True).start()
        got = b""
        with socket.create_connection(("127.0.0.1", urlsplit(url).port)) as asking:
            asking.sendall(b"GET / HTTP/1.1\r\n\r\n")
            try:
                while data := asking.recv(4096):
                    got += data
            except ConnectionResetError:
                pass
    assert answer.startswith(got)
    assert (len(got) < len(answer) / 2) if pieces > PIECES else got == answer[:25]


@pytest.mark.parametrize("divided", range(len(LAST_CHUNK) + 1))
def test_the_end_of_a_stream_never_gets_through_however_it_is_divided(divided: int) -> None:
    said = b"HTTP/1.1 200 OK\r\n\r\ndata: x\n\n"

    def serve(server: socket.socket) -> None:
        end, _ = server.accept()
        with end:
            end.recv(100)
            end.sendall(said + LAST_CHUNK[:divided])
            time.sleep(0.05)  # so that they come apart
            end.sendall(LAST_CHUNK[divided:])

    with socket.create_server(("127.0.0.1", 0)) as server, breaking_proxy(server.getsockname()[1]) as url:
        threading.Thread(target=serve, args=(server,), daemon=True).start()
        with socket.create_connection(("127.0.0.1", urlsplit(url).port)) as asking:
            asking.sendall(b"GET / HTTP/1.1\r\n\r\n")
            got = b""
            try:
                while data := asking.recv(4096):
                    got += data
            except ConnectionResetError:
                pass
    assert said.startswith(got)
