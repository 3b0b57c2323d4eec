"""The certificate of a node's Ray: without one of the same run there is no connection, and connections are encrypted.

If a run has several hosts, Ray listens on all interfaces, and gcs_server ends at a certain call without a token. The
key of the authority follows from the token of the run, so each node signs a certificate that all others accept.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
from datetime import datetime, timedelta, timezone
from pathlib import Path

AUTHORITY, CERTIFICATE, KEY = "authority.pem", "node.pem", "node.key"  # in the folder of a node
_LASTS = timedelta(days=3650)  # it is deleted with the run
_EARLIER = timedelta(days=1)  # clocks of hosts differ


def variables(folder: str) -> dict[str, str]:
    """Return the variables that let Ray use the certificate in a folder, in servers and clients."""
    files = {"RAY_TLS_CA_CERT": AUTHORITY, "RAY_TLS_SERVER_CERT": CERTIFICATE, "RAY_TLS_SERVER_KEY": KEY}
    return {"RAY_USE_TLS": "1"} | {name: f"{folder}/{file}" for name, file in files.items()}


def write(folder: Path, address: str, token: str) -> None:
    """Write the certificate of a node at an address, with mode 0600. Raises OSError."""
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    def named(name: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])

    def place(address: str) -> x509.GeneralName:
        try:
            return x509.IPAddress(ipaddress.ip_address(address))
        except ValueError:
            return x509.DNSName(address)

    def certificate(name: str, key: ec.EllipticCurvePrivateKey, is_authority: bool, *places: x509.GeneralName) -> bytes:
        now = datetime.now(timezone.utc)
        builder = x509.CertificateBuilder(
            issuer_name=named("authority"),
            subject_name=named(name),
            public_key=key.public_key(),
            serial_number=x509.random_serial_number(),
            not_valid_before=now - _EARLIER,
            not_valid_after=now + _LASTS,
        )
        builder = builder.add_extension(x509.BasicConstraints(is_authority, None), critical=True)
        if places:
            builder = builder.add_extension(x509.SubjectAlternativeName(places), critical=False)
        return builder.sign(authority, SHA256()).public_bytes(Encoding.PEM)

    curve = ec.SECP256R1()
    number = int.from_bytes(hmac.digest(token.encode(), b"authority", "sha512"), "big")
    authority = ec.derive_private_key(number % (2**curve.key_size // 2) + 1, curve)
    key = ec.generate_private_key(curve)
    files = {
        AUTHORITY: certificate("authority", authority, True),
        CERTIFICATE: certificate("node", key, False, *map(place, {address, "127.0.0.1", "::1", "localhost"})),
        KEY: key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
    }
    for name, content in files.items():
        with os.fdopen(os.open(folder / name, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
