"""Peers that check each other's role, with real TLS certificates over real gRPC."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from structlog.testing import capture_logs

from motet.clock import FakeClock, monotonic
from motet.errors import SetupError
from motet.rpc import Link
from motet.tls import RETRY_SECONDS, TlsIdentity, acting_as
from motet.transport.over_grpc import GrpcNetwork, is_healthy, serving
from motet.transport.over_grpc.roles import ROLES
from tests.common.echo import TALK, Echo, open_talk
from tests.common.waiting import until
from tests.support.authority import DAY, Authority
from tests.support.logs import use_plain_logs


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@asynccontextmanager
async def server_of(folder: Path, echo: Echo | None = None) -> AsyncIterator[str]:
    """Serve as the scheduler. Returns the address."""
    identity = TlsIdentity(folder, "scheduler", clock=monotonic)
    with acting_as(identity):
        roles = {**ROLES, "/test.Echo/Talk": frozenset({"gateway"})}
        context = serving("127.0.0.1:0", (echo or Echo()).add, grace=0, roles=roles)
        server = await context.__aenter__()
    try:
        yield f"127.0.0.1:{server.port}"
    finally:
        await context.__aexit__(None, None, None)


@asynccontextmanager
async def linked(folder: Path | None, address: str, peer: str = "scheduler") -> AsyncIterator[Link[bytes, bytes]]:
    """A gateway's link. Without a folder it uses plain text."""
    link: Link[bytes, bytes] = Link(
        peer, address, TALK, network=GrpcNetwork(), greet=lambda: [b"hello"], receive=lambda _: None
    )
    with acting_as(TlsIdentity(folder, "gateway", clock=monotonic) if folder is not None else None):
        running = asyncio.create_task(link.run())
    try:
        yield link
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def complaint(folder: Path | None, address: str, peer: str = "scheduler") -> str:
    """The error of a link that cannot connect."""
    use_plain_logs()
    with capture_logs() as logs:
        async with linked(folder, address, peer) as link:
            await until(lambda: len([line for line in logs if line["event"] == "stream_retry"]) >= 3)
            assert not link.connected
    (line,) = [line for line in logs if line["event"] == "connect_failed"]  # once is enough
    assert line["link"] == peer
    return str(line["reason"])


async def test_peers_with_one_authority_can_connect_and_health_reports_it(authority: Authority, tmp_path: Path) -> None:
    ours, theirs = authority.issue(tmp_path / "g", "gateway"), authority.issue(tmp_path / "s", "scheduler")
    async with server_of(theirs) as address, linked(ours, address) as link:
        await until(lambda: link.connected)
        with acting_as(TlsIdentity(ours, "gateway", clock=monotonic)):
            assert await is_healthy(address, "scheduler")
            assert not await is_healthy(address, "runner")
            assert not await is_healthy(address), "without a role it would have to be called by its address"
        assert not await is_healthy(address, "scheduler"), "who speaks plain text is not heard"


async def test_a_client_without_a_certificate_of_the_authority_is_refused(authority: Authority, tmp_path: Path) -> None:
    echo = Echo()
    theirs = authority.issue(tmp_path / "s", "scheduler")
    ours = authority.issue(tmp_path / "g", "gateway")
    stranger = Authority().issue(tmp_path / "o", "gateway")
    trusted = (theirs / "ca.crt").read_bytes()

    async def says(*pair: bytes) -> bytes:
        """The server's answer to a client that trusts it and shows this TLS certificate."""
        credentials = grpc.ssl_channel_credentials(trusted, *pair)
        options = [("grpc.ssl_target_name_override", "scheduler.motet.internal")]
        async with grpc.aio.secure_channel(address, credentials, options=options) as channel:
            call = open_talk(channel)
            await call.write(b"hello")
            answer: bytes = await call.read()
            call.cancel()
            return answer

    use_plain_logs()
    async with server_of(theirs, echo) as address, linked(None, address) as plain:
        assert await says(*((ours / name).read_bytes() for name in ("tls.key", "tls.crt"))) == b"hello"
        for pair in ([], [(stranger / name).read_bytes() for name in ("tls.key", "tls.crt")]):
            with pytest.raises(grpc.aio.AioRpcError, match="Socket closed"):
                await says(*pair)
        with capture_logs() as logs:
            await until(lambda: len([line for line in logs if line["event"] == "stream_retry"]) >= 2)
        assert not plain.connected
    assert echo.heard == [[b"hello"]]


async def test_unix_sockets_stay_plain(authority: Authority, tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/echo.sock"
    with acting_as(TlsIdentity(authority.issue(tmp_path / "s", "scheduler"), "scheduler", clock=monotonic)):
        async with serving(address, Echo().add):
            assert await is_healthy(address, "scheduler")
            with acting_as(None):
                assert await is_healthy(address)


async def test_a_server_in_another_role_is_refused_with_the_reason(authority: Authority, tmp_path: Path) -> None:
    ours, theirs = authority.issue(tmp_path / "g", "gateway"), authority.issue(tmp_path / "s", "scheduler")
    async with server_of(theirs) as address:
        said = await complaint(ours, address, "supervisor")
    assert said.startswith("the server is not supervisor.motet.internal")


async def test_a_peer_of_another_authority_is_refused_with_the_reason(authority: Authority, tmp_path: Path) -> None:
    ours, theirs = Authority("other").issue(tmp_path / "g", "gateway"), authority.issue(tmp_path / "s", "scheduler")
    async with server_of(theirs) as address:
        said = await complaint(ours, address)
    assert said.startswith(f"scheduler.motet.internal does not use TLS, or {ours}/ca.crt did not sign its certificate")


async def test_peers_of_two_authorities_talk_while_both_trust_both(authority: Authority, tmp_path: Path) -> None:
    """This replaces an authority without a gap: both in every file, then new certificates, then only the new one."""
    ours, theirs = authority.issue(tmp_path / "g", "gateway"), Authority("new").issue(tmp_path / "s", "scheduler")
    both = (ours / "ca.crt").read_bytes() + (theirs / "ca.crt").read_bytes()
    for folder in (ours, theirs):
        (folder / "ca.crt").write_bytes(both)
    async with server_of(theirs) as address, linked(ours, address) as link:
        await until(lambda: link.connected)


async def test_a_peer_in_plain_text_is_refused_with_the_reason(authority: Authority, tmp_path: Path) -> None:
    ours = authority.issue(tmp_path / "g", "gateway")
    async with serving("127.0.0.1:0", Echo().add, grace=0) as server:
        said = await complaint(ours, f"127.0.0.1:{server.port}")
    assert said.startswith("scheduler.motet.internal does not use TLS")


async def test_a_peer_whose_certificate_has_expired_is_refused_with_the_reason(
    authority: Authority, tmp_path: Path
) -> None:
    ours, theirs = authority.issue(tmp_path / "g", "gateway"), authority.issue(tmp_path / "s", "scheduler")
    async with server_of(theirs) as address:
        authority.issue(theirs, "scheduler", life=-DAY)
        # It keeps the one that it had: it never loads a certificate that is not valid by its own clock.
        async with linked(ours, address) as link:
            await until(lambda: link.connected)
    assert (
        TlsIdentity(ours, "gateway", clock=monotonic)
        .explain_failure("Tls handshake failed: certificate has expired", "scheduler")
        .startswith("the certificate of scheduler.motet.internal has expired")
    )


async def test_a_new_certificate_is_used_without_a_restart_on_either_side(tmp_path: Path) -> None:
    old, new = Authority("old"), Authority("new")
    ours, theirs = old.issue(tmp_path / "g", "gateway"), old.issue(tmp_path / "s", "scheduler")
    async with server_of(theirs) as address:
        async with linked(ours, address) as link:
            await until(lambda: link.connected)
            new.issue(theirs, "scheduler")
            new.issue(ours, "gateway")
            assert link.connected, "streams that are up stay up"
        async with linked(ours, address) as link:
            await until(lambda: link.connected)
        old.issue(ours, "gateway")
        assert (await complaint(ours, address)).startswith("scheduler.motet.internal does not use TLS, or")


async def test_a_link_goes_on_once_its_own_certificate_has_been_renewed(authority: Authority, tmp_path: Path) -> None:
    ours, theirs = tmp_path / "g", authority.issue(tmp_path / "s", "scheduler")
    async with server_of(theirs) as address:
        authority.issue(ours, "gateway", life=-DAY)
        assert "certificate has expired" in await complaint(ours, address)
        use_plain_logs()
        with capture_logs() as logs:
            async with linked(ours, address) as link:
                await until(lambda: [line for line in logs if line["event"] == "connect_failed"])
                assert not link.connected
                authority.issue(ours, "gateway")
                await until(lambda: link.connected)


def break_certificate(folder: Path) -> None:
    (folder / "tls.crt").write_text("nothing\n")


def break_authority(folder: Path) -> None:
    (folder / "ca.crt").write_text("nothing\n")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (
            lambda folder: (folder / "ca.crt").unlink(),
            r"/ca\.crt cannot be read: No such file.* in the folder MOTET_TLS_DIR",
        ),
        (lambda folder: (folder / "tls.key").unlink(), r"/tls\.key cannot be read: No such file"),
        (break_certificate, r"/tls\.crt and .*/tls\.key do not belong together"),
        (break_authority, r"/ca\.crt has no certificate"),
        (
            lambda folder: Authority().issue(folder / "o", "gateway") and mix(folder, "tls.key"),
            "do not belong together",
        ),
        (lambda folder: Authority().issue(folder / "o", "gateway") and mix(folder, "ca.crt"), "not valid for gateway"),
        (lambda folder: Authority().issue(folder, "gateway", life=-DAY), "certificate has expired"),
        (
            lambda folder: Authority().issue(folder, "runner"),
            r"not valid for gateway\.motet\.internal: Hostname mismatch",
        ),
        (lambda folder: Authority().issue(folder, "gateway", for_clients=False), "purpose"),
    ],
)
def test_unusable_files_are_named_with_the_fix(
    tmp_path: Path, authority: Authority, spoil: Callable[[Path], object], said: str
) -> None:
    folder = authority.issue(tmp_path, "gateway")
    TlsIdentity(folder, "gateway", clock=monotonic).check()
    spoil(folder)
    with pytest.raises(SetupError, match=said):
        TlsIdentity(folder, "gateway", clock=monotonic).check()


def mix(folder: Path, name: str) -> None:
    """Replace one file by that of another certificate."""
    (folder / "o" / name).replace(folder / name)


def test_a_process_with_the_wrong_certificate_does_not_start(tmp_path: Path, authority: Authority) -> None:
    modules = {"read_settings": "read", "service_main": "run", "settings": "ProcessSettings"}
    serve = "".join(f"from motet.{module} import {name}\n" for module, name in modules.items())
    done = subprocess.run(
        [sys.executable, "-c", f"{serve}run('gateway', read(ProcessSettings), None)"],
        env={"PATH": "", "MOTET_TLS_DIR": str(authority.issue(tmp_path, "runner"))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(
        f"gateway: {tmp_path}/tls.crt is not valid for gateway.motet.internal"
    )
    assert "Traceback" not in done.stderr


async def test_a_half_replaced_certificate_is_not_loaded(authority: Authority, tmp_path: Path) -> None:
    folder = authority.issue(tmp_path, "gateway")
    identity = TlsIdentity(folder, "gateway", clock=monotonic)
    before = identity.keys()
    Authority().issue(folder / "o", "gateway")
    mix(folder, "tls.crt")
    assert identity.keys() is before
    mix(folder, "tls.key")
    mix(folder, "ca.crt")
    assert identity.keys() is not before


def overwrite(file: Path, content: bytes) -> None:
    """So that nothing tells by the file's metadata that it has changed."""
    before = file.stat()
    assert len(content) == before.st_size
    file.write_bytes(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_rejected_certificate_is_tried_again_each_minute(authority: Authority, tmp_path: Path) -> None:
    folder, clock = authority.issue(tmp_path, "gateway"), FakeClock()
    identity = TlsIdentity(folder, "gateway", clock=clock)
    before = identity.keys()
    authority.issue(folder, "gateway")
    valid = (folder / "tls.crt").read_bytes()
    use_plain_logs()
    with capture_logs() as logs:
        overwrite(folder / "tls.crt", bytes(len(valid)))  # as one whose time has not yet begun
        for _ in range(3):
            assert identity.keys() is before
        clock.advance(RETRY_SECONDS)
        for _ in range(3):
            assert identity.keys() is before
        assert [line["event"] for line in logs] == ["tls_certificate_rejected"] * 2, "not at every handshake"
        overwrite(folder / "tls.crt", valid)
        assert identity.keys() is before, "not before the minute is over"
        clock.advance(RETRY_SECONDS)
        assert identity.keys().certificate == valid
    (folder / "tls.key").unlink()
    with capture_logs() as logs:
        for _ in range(3):
            assert identity.keys().certificate == valid
    assert len(logs) == 1, "a missing file is not named at every handshake either"
