"""The TLS certificates of a control plane of one test run, in a folder that is deleted with it."""

import ipaddress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

LIFE = timedelta(days=1)
SLACK = timedelta(hours=1)
"""Validity begins so much earlier: tests may run a process with a shifted clock."""


@dataclass(frozen=True)
class Pair:
    certificate: Path
    key: Path


class ClusterAuthority:
    """A certificate authority. `issue` writes PEM files beside its own."""

    def __init__(self, folder: Path, name: str = "motet-test") -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        usage = x509.BasicConstraints(ca=True, path_length=0)
        certificate = _builder(self._name, self._name, self._key).add_extension(usage, critical=True)
        self.pair = _written(folder, name, certificate.sign(self._key, hashes.SHA256()), self._key)

    def serving(self, name: str, hosts: list[str]) -> Pair:
        alternatives = x509.SubjectAlternativeName([_host(host) for host in hosts])
        return self._issue(name, _name(name), ExtendedKeyUsageOID.SERVER_AUTH, alternatives)

    def client(self, user: str, group: str | None = None) -> Pair:
        """Kubernetes takes the user from the common name, and the group from the organisation."""
        return self._issue(user.replace(":", "-"), _name(user, group), ExtendedKeyUsageOID.CLIENT_AUTH)

    def _issue(
        self, file: str, subject: x509.Name, purpose: x509.ObjectIdentifier, *extensions: x509.ExtensionType
    ) -> Pair:
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _builder(subject, self._name, key)
        for extension in (x509.ExtendedKeyUsage([purpose]), *extensions):
            certificate = certificate.add_extension(extension, critical=False)
        return _written(self._folder, file, certificate.sign(self._key, hashes.SHA256()), key)


def token_keys(folder: Path) -> Pair:
    """The key with which the API server signs ServiceAccount tokens; the "certificate" is the bare public key."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return Pair(_file(folder / "tokens.pub", public), _file(folder / "tokens.key", _pem(key)))


def _name(common: str, organization: str | None = None) -> x509.Name:
    parts = [(NameOID.COMMON_NAME, common), (NameOID.ORGANIZATION_NAME, organization)]
    return x509.Name([x509.NameAttribute(oid, value) for oid, value in parts if value is not None])


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SLACK)
        .not_valid_after(now + LIFE)
    )


def _pem(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> bytes:
    # kube-controller-manager takes the keys of ServiceAccount tokens in this form only.
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.TraditionalOpenSSL,
        serialization.NoEncryption(),
    )


def _written(folder: Path, name: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Pair:
    public = certificate.public_bytes(serialization.Encoding.PEM)
    return Pair(_file(folder / f"{name}.crt", public), _file(folder / f"{name}.key", _pem(key)))


def _file(path: Path, content: bytes) -> Path:
    path.touch(mode=0o600)
    path.write_bytes(content)
    return path
