"""The channel's certificates: authorities that outlive the operator, and server certificates that they sign.

A new authority is created long before the present one expires, and workers are told to trust both. The new one signs
only after all workers have certainly read that. Which one signs follows from their dates alone.
"""

import ipaddress
import ssl
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Protocol

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

AUTHORITY_LIFETIME = timedelta(days=365)
#: The next authority is created this long before the newest expires.
RENEWAL = AUTHORITY_LIFETIME / 3
#: Time until all workers trust a new authority: it is published, and kubelets refresh mounted files.
SPREAD = timedelta(days=1)
SERVER_LIFETIME = timedelta(days=30)
#: Certificates are valid from this long before their creation, because clocks of nodes differ.
CLOCK_SKEW = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class Validity:
    """When a certificate begins and ceases to be valid."""

    start: datetime
    end: datetime

    @classmethod
    def of(cls, certificate: x509.Certificate) -> "Validity":
        return cls(certificate.not_valid_before_utc, certificate.not_valid_after_utc)


def validities(server: x509.Certificate, trusted: bytes) -> dict[str, Validity]:
    """Validity of the server's certificate and of the newest authority in the PEM `trusted`."""
    authorities = map(Validity.of, x509.load_pem_x509_certificates(trusted))
    return {"Server": Validity.of(server), "Authority": max(authorities, key=lambda one: one.end)}


class Certificate(Protocol):
    """The channel's certificate, and the authorities by which workers trust it."""

    @property
    def context(self) -> ssl.SSLContext:
        """For the server. It stays the same object when the certificate is renewed."""
        ...

    @property
    def trusted(self) -> bytes:
        """PEM of all certificates that workers must trust."""
        ...

    @property
    def validities(self) -> Mapping[str, Validity]:
        """Validity of the certificates in use: `Server` and `Authority`. Empty before the first refresh."""
        ...

    async def refresh(self) -> None:
        """Reads and renews. If that fails, the certificate in memory stays.

        Raises:
            Unavailable: it cannot be read now.
            ValueError: what was read is invalid.
        """
        ...


@dataclass(frozen=True, slots=True)
class Authority:
    """PEM of a certificate that workers trust, and of its private key."""

    certificate: bytes
    key: bytes

    @property
    def start(self) -> datetime:
        """Start of its validity."""
        return x509.load_pem_x509_certificate(self.certificate).not_valid_before_utc

    @property
    def end(self) -> datetime:
        """End of its validity."""
        return x509.load_pem_x509_certificate(self.certificate).not_valid_after_utc


def new_authority(now: datetime) -> Authority:
    """Creates a self-signed authority (P-256)."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "pipetransformer-channel")])
    certificate = (
        _builder(subject, subject, key.public_key(), now, now + AUTHORITY_LIFETIME)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return Authority(certificate.public_bytes(serialization.Encoding.PEM), _pem(key))


def renewed(authorities: Sequence[Authority], now: datetime) -> tuple[Authority, ...]:
    """The authorities that have not expired, oldest first, and a new one if the newest expires soon."""
    valid = sorted((one for one in authorities if one.end > now), key=lambda one: one.start)
    if not valid or valid[-1].end - now < RENEWAL:
        valid.append(new_authority(now))
    return tuple(valid)


def signing(authorities: Sequence[Authority], now: datetime) -> Authority:
    """The newest authority that all workers trust by now; otherwise the oldest."""
    spread = [one for one in authorities if one.start + CLOCK_SKEW + SPREAD <= now]
    return max(spread, key=lambda one: one.start) if spread else min(authorities, key=lambda one: one.start)


def server_context() -> ssl.SSLContext:
    """A TLS server context without a certificate yet."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.num_tickets = 0  # workers do not resume sessions, and tickets are a fifth of a connection's cost
    return context


def load_new_certificate(
    context: ssl.SSLContext, authority: Authority, hosts: Sequence[str], now: datetime
) -> x509.Certificate:
    """Loads a new certificate for `hosts` (DNS names or IP addresses), signed by `authority`, into `context`.
    Returns it.

    Raises:
        ValueError: the authority's PEM is invalid.
        TypeError: its key is not an elliptic-curve key.
    """
    issuer = x509.load_pem_x509_certificate(authority.certificate)
    issuer_key = serialization.load_pem_private_key(authority.key, password=None)
    if not isinstance(issuer_key, ec.EllipticCurvePrivateKey):
        raise TypeError("the channel's authority must have an elliptic-curve key")
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0][:64])])
    certificate = (
        _builder(subject, issuer.subject, key.public_key(), now, now + SERVER_LIFETIME)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([_general_name(host) for host in hosts]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
        .sign(issuer_key, hashes.SHA256())
    )
    with tempfile.NamedTemporaryFile(suffix=".pem") as file:  # the ssl module loads keys from files only
        Path(file.name).write_bytes(certificate.public_bytes(serialization.Encoding.PEM) + _pem(key))
        context.load_cert_chain(file.name)
    return certificate


class MountedCertificate:
    """A `Certificate` in a folder that cert-manager, for example, renews: `tls.crt`, `tls.key` and `ca.crt`.

    If `ca.crt` has a new authority, workers are first told to trust both. From the next refresh on the server uses the
    certificate that the new one signed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.context = server_context()
        self.trusted = b""
        self.validities: Mapping[str, Validity] = {}
        self._shown = b""

    async def refresh(self) -> None:
        """See `Certificate`."""
        try:
            trusted = (self._folder / "ca.crt").read_bytes()
            authorities = set(x509.load_pem_x509_certificates(trusted))
            if self.trusted and not authorities <= set(x509.load_pem_x509_certificates(self.trusted)):
                self.trusted = self._shown + b"\n" + trusted
                return
            pair = self._folder / "tls.crt", self._folder / "tls.key"
            server_context().load_cert_chain(*pair)  # if they do not match, a context has no certificate afterwards
            self.context.load_cert_chain(*pair)
            server = x509.load_pem_x509_certificate((self._folder / "tls.crt").read_bytes())
            self.validities = validities(server, trusted)
        except (OSError, ValueError) as error:
            raise ValueError(f"{self._folder}: cannot load tls.crt, tls.key and ca.crt: {error}") from error
        self.trusted = self._shown = trusted


def _builder(
    subject: x509.Name, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey, now: datetime, end: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(end)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
