"""The connection to the API server survives new tokens, new authorities and restarts."""

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from motet.kube import ApiConnection, KubeApi, KubeCredentials, StatusError, Unreachable
from tests.common.waiting import PATIENCE_S
from tests.support.authority import Authority

PATH = "/api/v1/namespaces/here/configmaps/it"


class Server:
    """Gives the answers of the test in turn, and then the last one again and again."""

    def __init__(self, *answers: tuple[int, Any] | tuple[int, Any, dict[str, str]]) -> None:
        self.answers = list(answers)
        self.tokens: list[str] = []

    async def handle(self, request: web.Request) -> web.Response:
        self.tokens.append(request.headers.get("authorization", "").removeprefix("Bearer "))
        status, body, *headers = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        given = headers[0] if headers else None
        return (
            web.Response(status=status, body=body, headers=given)
            if isinstance(body, bytes)
            else web.json_response(body, status=status, headers=given)
        )

    @asynccontextmanager
    async def up(self, identity: Path | None = None, port: int = 0) -> AsyncIterator[int]:
        trust = None
        if identity is not None:
            trust = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            trust.load_cert_chain(identity / "tls.crt", identity / "tls.key")
        runner = web.ServerRunner(web.Server(self.handle))  # type: ignore[arg-type]
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port, ssl_context=trust)
        await site.start()
        try:
            yield runner.addresses[0][1]
        finally:
            await runner.cleanup()


def kubeconfig(folder: Path, server: str, token: str = "first", authority: Path | None = None) -> Path:
    cluster = {"server": server}
    if authority is not None:
        cluster |= {"certificate-authority": str(authority), "tls-server-name": "api.motet.internal"}
    file = folder / "kubeconfig"
    file.write_text(
        yaml.safe_dump(
            {
                "clusters": [{"name": "it", "cluster": cluster}],
                "users": [{"name": "me", "user": {"token": token}}],
                "contexts": [{"name": "it", "context": {"cluster": "it", "user": "me"}}],
                "current-context": "it",
            }
        )
    )
    return file


async def test_a_refused_token_is_read_again_within_the_same_request(tmp_path: Path) -> None:
    server = Server((401, {"message": "Unauthorized"}), (200, {"kind": "ConfigMap"}))
    async with server.up() as port, KubeApi(kubeconfig(tmp_path, f"http://127.0.0.1:{port}"), "IT") as api:
        kubeconfig(tmp_path, f"http://127.0.0.1:{port}", token="second")
        assert await api.get(PATH, seconds=PATIENCE_S) == {"kind": "ConfigMap"}
    assert server.tokens == ["first", "second"]


@pytest.mark.parametrize(
    ("status", "body", "expected", "words"),
    [
        (403, {"message": "no right"}, StatusError, "no right"),
        (409, {}, StatusError, "HTTP 409"),
        (418, b"a teapot", StatusError, "a teapot"),
        (429, {"message": "slower"}, Unreachable, "429: slower"),
        (500, {"message": "broken"}, Unreachable, "500: broken"),
        (503, b"<html>", Unreachable, "503: <html>"),
        (401, {"message": "Unauthorized"}, Unreachable, "401"),
        # A proxy in between says so of its own page, or of an answer that it has cut off.
        (200, b"<html>maintenance", Unreachable, "200 without an object: <html>maintenance"),
        (200, b"[]", Unreachable, "200 without an object"),
        (201, b"", Unreachable, "201 without an object"),
        (404, b"<html>no such page", Unreachable, "404, and not of the API server, .*: <html>no such page"),
        (404, {"message": "no route"}, Unreachable, "no route"),
        (404, b"404 page not found\n", Unreachable, "404 page not found"),
        (404, {"kind": "Status", "reason": "NotFound"}, Unreachable, "NotFound"),
    ],
)
async def test_each_http_status_becomes_its_error(
    tmp_path: Path, status: int, body: Any, expected: type[Exception], words: str
) -> None:
    async with (
        Server((status, body)).up() as port,
        KubeApi(kubeconfig(tmp_path, f"http://127.0.0.1:{port}"), "IT") as api,
    ):
        with pytest.raises(expected, match=words):
            await api.get(PATH, seconds=PATIENCE_S)


@pytest.mark.parametrize("said", [b"404 page not found\n", {"kind": "Status", "reason": "NotFound"}])
async def test_what_the_api_server_does_not_find_is_gone(tmp_path: Path, said: Any) -> None:
    """A proxy may say the same, without the header. `tests/kube/test_leases.py` asks the real server."""
    server = Server((404, said, {"Audit-Id": "1"}))
    async with server.up() as port, KubeApi(kubeconfig(tmp_path, f"http://127.0.0.1:{port}"), "IT") as api:
        with pytest.raises(StatusError, match=r"NotFound|404 page not found"):
            await api.get(PATH, seconds=PATIENCE_S)


async def test_an_unreachable_server_is_not_a_refusal(tmp_path: Path) -> None:
    async with Server((200, {})).up() as port:
        pass
    async with KubeApi(kubeconfig(tmp_path, f"http://127.0.0.1:{port}"), "IT") as api:
        with pytest.raises(Unreachable, match="does not answer"):
            await api.get(PATH, seconds=PATIENCE_S)


async def test_a_replaced_ca_file_is_read_again(tmp_path: Path) -> None:
    one, trusted = Authority("one").issue(tmp_path / "one", "api"), tmp_path / "ca.crt"
    trusted.write_bytes((one / "ca.crt").read_bytes())
    server = Server((200, {"kind": "ConfigMap"}))
    async with server.up(one) as port:
        credentials = KubeCredentials(kubeconfig(tmp_path, f"https://127.0.0.1:{port}", authority=trusted), "IT")
        connection = ApiConnection(credentials)
        assert (await connection.send("GET", PATH, None, seconds=PATIENCE_S)).status == 200
    other = Authority("other").issue(tmp_path / "other", "api")
    try:
        async with server.up(other, port):
            with pytest.raises(Unreachable, match="certificate"):
                await connection.send("GET", PATH, None, seconds=PATIENCE_S)
            trusted.write_bytes((other / "ca.crt").read_bytes())
            assert (await connection.send("GET", PATH, None, seconds=PATIENCE_S)).status == 200
    finally:
        await connection.close()
