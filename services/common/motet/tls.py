"""Mutual TLS: how processes prove their roles to each other. The files may change while a process runs.

A process knows a peer by its role and not by its address, because the addresses of pods change: the scheduler is
always `scheduler.motet.internal`. Every process with a TLS certificate of the same authority may connect. Each side
checks the role of the other: the client when it connects, the server at every call (`motet.transport.over_grpc.roles`).
"""

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

import grpc
import structlog

from motet.clock import Clock
from motet.errors import SetupError

log = structlog.get_logger(__name__)

DOMAIN = "motet.internal"
CERTIFICATE, KEY, AUTHORITY = "tls.crt", "tls.key", "ca.crt"
FILES = (CERTIFICATE, KEY, AUTHORITY)

RETRY_SECONDS = 60.0
"""When rejected files are tried again, although nobody has changed them: their time may only begin, by our clock."""

_FIX = "Use the three files of one TLS Secret: a certificate, its key, and the authority that signed it."


def name_of(role: str) -> str:
    """The DNS name in a TLS certificate of this role."""
    return f"{role}.{DOMAIN}"


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The contents of the three files at one time, as PEM."""

    certificate: bytes
    key: bytes
    authority: bytes


class TlsIdentity:
    """The TLS certificate of this process, and the authority that it trusts. It uses changed files when they are
    valid."""

    def __init__(self, folder: Path, role: str, *, clock: Clock) -> None:
        self.role = role
        self._folder = folder
        self._clock = clock
        self._lock = threading.Lock()  # servers ask from gRPC's threads
        self._stamp: object = None
        self._rejected_stamp: object = None
        self._rejected_until = 0.0
        self._keys: TlsFiles | None = None

    def keys(self) -> TlsFiles:
        """The files as they are now, or the last valid ones. Raises SetupError if they have never been valid."""
        with self._lock:
            stamp, now = self._read_stamp(), self._clock()
            if self._keys is not None and stamp == self._stamp:
                return self._keys
            if self._keys is not None and stamp == self._rejected_stamp and now < self._rejected_until:
                return self._keys
            try:
                keys = TlsFiles(*(self._read(name) for name in FILES))
                self._verify()
            except SetupError as error:
                if self._keys is None:
                    raise
                log.warning("tls_certificate_rejected", reason=error.message, hint="The old certificate stays in use.")
                self._rejected_stamp, self._rejected_until = stamp, now + RETRY_SECONDS
                return self._keys
            if self._keys is not None:
                log.info("tls_certificate_renewed", folder=str(self._folder))
            self._stamp, self._keys = stamp, keys
            return keys

    def check(self) -> None:
        """Raises SetupError if no peer would accept the files of this process."""
        for name in FILES:
            self._read(name)
        self._verify()

    def channel_credentials(self) -> grpc.ChannelCredentials:
        keys = self.keys()
        return grpc.ssl_channel_credentials(keys.authority, keys.key, keys.certificate)

    def server_credentials(self) -> grpc.ServerCredentials:
        """Credentials that read the files again at every handshake. So the server need not restart for a new
        certificate."""
        used = self.keys()

        def renewed() -> grpc.ServerCertificateConfiguration | None:
            nonlocal used
            keys = self.keys()
            if keys is used:
                return None
            used = keys
            return _for_server(keys)

        return grpc.dynamic_ssl_server_credentials(
            _for_server(used),
            renewed,  # type: ignore[arg-type]  # gRPC accepts None: nothing has changed
            require_client_authentication=True,
        )

    def explain_failure(self, why: str, peer: str) -> str:
        """Explain why a connection failed in its TLS handshake. Empty if it failed for another reason."""
        if not any(sign in why for sign in ("handshake failed", "Verification Check", "Socket closed")):
            return ""
        try:
            self.check()
        except SetupError as error:
            return error.message
        if "Hostname Verification" in why:
            return f"the server is not {name_of(peer)}: its certificate has another name. Check the address."
        if "expired" in why:
            return f"the certificate of {name_of(peer)} has expired. Renew the Secret of that component."
        if "handshake failed" in why:
            return (
                f"{name_of(peer)} does not use TLS, or {self._folder / AUTHORITY} did not sign its certificate. Give "
                "both sides certificates of the same authority."
            )
        return ""  # the peer closed the connection: perhaps it is only stopping

    def _read_stamp(self) -> object:
        """A value that changes whenever a file is replaced."""
        return tuple(map(self._stamp_of, FILES))

    def _stamp_of(self, name: str) -> object:
        try:
            it = (self._folder / name).stat()
        except OSError as error:
            return error.errno
        return it.st_mtime_ns, it.st_ino, it.st_size

    def _read(self, name: str) -> bytes:
        try:
            return (self._folder / name).read_bytes()
        except OSError as error:
            raise self._unreadable(name, error) from None

    def _unreadable(self, name: str, error: OSError) -> SetupError:
        return SetupError(
            f"{self._folder / name} cannot be read: {error.strerror}. It must be in the folder MOTET_TLS_DIR. {_FIX}"
        )

    def _verify(self) -> None:
        """Do a TLS handshake of this process with itself. It finds every error that a peer would find."""
        certificate, key, authority = (self._folder / name for name in FILES)
        sides = [ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)]
        for side in sides:
            try:
                side.load_verify_locations(authority)
            except ssl.SSLError:
                raise SetupError(f"{authority} has no certificate in PEM form. {_FIX}") from None
            try:
                side.load_cert_chain(certificate, key)
            except ssl.SSLError as error:
                raise SetupError(
                    f"{certificate} and {key} do not belong together ({error.reason or 'not PEM'}). {_FIX}"
                ) from None
            side.verify_mode = ssl.CERT_REQUIRED
        try:
            _shake_hands(*sides, name=name_of(self.role))
        except ssl.SSLCertVerificationError as error:
            raise SetupError(
                f"{certificate} is not valid for {name_of(self.role)}: {error.verify_message}. {authority.name} must "
                "have signed it, it must be valid now and have that DNS name, and it must allow client and server use."
            ) from None


def _for_server(keys: TlsFiles) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(keys.key, keys.certificate)], keys.authority)


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, *, name: str) -> None:
    """Do a handshake in memory. Raises the error of the side that does not accept the other's certificate."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(down, up, server_hostname=name), server.wrap_bio(up, down, server_side=True)]
    for _ in range(3):  # in TLS 1.3 the server gets the client's certificate in its second step
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue


_current: ContextVar[TlsIdentity | None] = ContextVar("motet_tls_identity", default=None)


def current_identity() -> TlsIdentity | None:
    """The TLS identity of this process; None if it does not use TLS."""
    return _current.get()


@contextmanager
def acting_as(identity: TlsIdentity | None) -> Iterator[None]:
    """Everything that is started inside this context uses `identity`."""
    token = _current.set(identity)
    try:
        yield
    finally:
        _current.reset(token)
