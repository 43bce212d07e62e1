"""Issues TLS certificates for services under test, as a chart would put them into a Secret."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DAY = timedelta(days=1)


class Authority:
    def __init__(self, name: str = "motet") -> None:
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        basic = x509.BasicConstraints(ca=True, path_length=None)
        self._certificate = self._sign(self._name, self._key.public_key(), DAY, (basic, True))

    def issue(
        self,
        folder: Path,
        role: str,
        *,
        life: timedelta = DAY,
        for_clients: bool = True,
        others: tuple[str, ...] = (),
    ) -> Path:
        """Write the three files into `folder`. They replace those of an earlier certificate."""
        folder.mkdir(parents=True, exist_ok=True)
        key = ec.generate_private_key(ec.SECP256R1())
        uses = [ExtendedKeyUsageOID.SERVER_AUTH, *([ExtendedKeyUsageOID.CLIENT_AUTH] if for_clients else [])]
        certificate = self._sign(
            x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, role)]),
            key.public_key(),
            life,
            (x509.SubjectAlternativeName([x509.DNSName(f"{one}.motet.internal") for one in (role, *others)]), False),
            (x509.ExtendedKeyUsage(uses), False),
        )
        pem = serialization.Encoding.PEM
        private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        contents = {
            "tls.crt": certificate.public_bytes(pem),
            "tls.key": private,
            "ca.crt": self._certificate.public_bytes(pem),
        }
        for name, content in contents.items():
            (folder / f".{name}").write_bytes(content)
            (folder / f".{name}").replace(folder / name)
        return folder

    def _sign(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePublicKey,
        life: timedelta,
        *extensions: tuple[x509.ExtensionType, bool],
    ) -> x509.Certificate:
        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 10 * DAY)
            .not_valid_after(now + life)
        )
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical)
        return builder.sign(self._key, hashes.SHA256())
