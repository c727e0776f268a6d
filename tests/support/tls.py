"""A certificate authority made with openssl, and clients of a server behind TLS."""

from __future__ import annotations

import base64
import ssl
import subprocess
from pathlib import Path

from tests.support.machine import PATIENCE


def basic(password: str, user: str = "alice") -> bytes:
    return b"Basic " + base64.b64encode(f"{user}:{password}".encode())


class Authority:
    """A CA made by openssl, and certificates it signed."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.name, self.file = folder, name, folder / f"{name}.crt"
        self._openssl(
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:P-256",
            "-nodes",
            "-days",
            "2",
            "-subj",
            f"/CN={name}",
            "-keyout",
            f"{name}.key",
            "-out",
            f"{name}.crt",
            "-addext",
            "basicConstraints=critical,CA:TRUE",
            "-addext",
            "keyUsage=critical,keyCertSign",
        )

    def sign(self, name: str, serial: int) -> tuple[Path, Path]:
        """Return the certificate and the key of 127.0.0.1."""
        self._openssl(
            "req",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:P-256",
            "-nodes",
            "-subj",
            f"/CN={name}",
            "-keyout",
            f"{name}.key",
            "-out",
            f"{name}.csr",
        )
        (self.folder / "extensions").write_text(
            "subjectAltName=IP:127.0.0.1\nauthorityKeyIdentifier=keyid\nkeyUsage=digitalSignature\n"
        )
        self._openssl(
            "x509",
            "-req",
            "-in",
            f"{name}.csr",
            "-CA",
            self.file.name,
            "-CAkey",
            f"{self.name}.key",
            "-set_serial",
            str(serial),
            "-days",
            "1",
            "-extfile",
            "extensions",
            "-out",
            f"{name}.crt",
        )
        return self.folder / f"{name}.crt", self.folder / f"{name}.key"

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=self.folder, check=True, capture_output=True, timeout=PATIENCE)


def client(authority: Authority, certificate: tuple[Path, Path] | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=authority.file)
    if certificate is not None:
        context.load_cert_chain(*certificate)
    return context


def write(file: Path, text: str) -> None:
    """Replace a file as configuration management does, with another inode."""
    temporary = file.with_name(f"{file.name}.new")
    temporary.write_text(text)
    temporary.replace(file)
