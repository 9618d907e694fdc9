"""What a team's Kafka asks of its clients, in front of the real broker: TLS, certificates of clients, SASL.

The embedded broker knows none of it, so this is written here: frames, SaslHandshake and SaslAuthenticate by kafka-python's own protocol
classes, SCRAM after RFC 5802, bearer tokens after RFC 7628, PLAIN after RFC 4616.
"""

import asyncio
import base64
import hashlib
import hmac
import secrets
import ssl
import struct
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from kafka.errors import SaslAuthenticationFailedError, UnsupportedSaslMechanismError
from kafka.protocol.sasl import SaslAuthenticateRequest, SaslAuthenticateResponse, SaslHandshakeRequest, SaslHandshakeResponse

from app.domain.ids import utc_now
from app.messaging.broker import broker_command
from tests.broker import free_port, wait_for_port

HANDSHAKE, AUTHENTICATE, VERSIONS = 17, 36, 18
HASHES = {"SCRAM-SHA-256": "sha256", "SCRAM-SHA-512": "sha512"}
ITERATIONS = 4096


@dataclass(kw_only=True)
class Guard:
    """Who gets through."""

    mechanism: str | None = None
    passwords: Mapping[str, str] = field(default_factory=dict[str, str])
    tokens: set[str] = field(default_factory=set[str])
    tls: ssl.SSLContext | None = None
    lifetime_ms: int = 0
    """How long a session is good; then the client has to prove itself again. 0: for ever."""
    proofs: int = 0
    """How often somebody proved who they are."""


@contextmanager
def guarded_broker(guard: Guard) -> Iterator[str]:
    """The broker behind a guard; the address that clients are given, and which the broker names to them."""
    port, behind = free_port(), free_port()
    command = broker_command(behind)
    command[command.index("--advertised-listener-url") + 1] = f"tcp://localhost:{port}"
    broker = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="guard", daemon=True)

    async def serve() -> asyncio.Server:
        return await asyncio.start_server(lambda r, w: _Connection(guard, behind).serve(r, w), "127.0.0.1", port, ssl=guard.tls)

    async def leave(server: asyncio.Server) -> None:
        server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.wait(others) if others else None

    try:
        wait_for_port(behind)
        thread.start()
        server = asyncio.run_coroutine_threadsafe(serve(), loop).result(30)
        try:
            yield f"localhost:{port}"
        finally:
            asyncio.run_coroutine_threadsafe(leave(server), loop).result(30)
            loop.call_soon_threadsafe(loop.stop)
            thread.join(30)
    finally:
        loop.close()
        broker.kill()
        broker.wait()


class _Connection:
    """One client: asked who it is, then passed on."""

    def __init__(self, guard: Guard, behind: int) -> None:
        self._guard, self._behind = guard, behind
        self._known = guard.mechanism is None
        self._scram: _Scram | None = None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until either side ends."""
        back_reader, back_writer = await asyncio.open_connection("127.0.0.1", self._behind)
        back = asyncio.ensure_future(_pump(back_reader, writer))
        try:
            while True:
                frame = await reader.readexactly(struct.unpack(">i", await reader.readexactly(4))[0])
                key, version = struct.unpack(">hh", frame[:4])
                answer = self._answer(key, version, frame)
                if answer is not None:
                    writer.write(answer)
                elif self._known or key == VERSIONS:
                    back_writer.write(struct.pack(">i", len(frame)) + frame)
                else:
                    return  # as Kafka does with whoever asks for anything before they have said who they are
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            back.cancel()
            back_writer.close()
            writer.close()

    def _answer(self, key: int, version: int, frame: bytes) -> bytes | None:
        if self._guard.mechanism is None:
            return None
        if key == HANDSHAKE:
            asked: Any = SaslHandshakeRequest.decode(frame, version=version, header=True)
            error = 0 if asked.mechanism == self._guard.mechanism else UnsupportedSaslMechanismError.errno
            self._scram = _Scram(self._guard) if self._guard.mechanism in HASHES else None
            said = SaslHandshakeResponse(error_code=error, mechanisms=[self._guard.mechanism], version=version)
        elif key == AUTHENTICATE:
            asked = SaslAuthenticateRequest.decode(frame, version=version, header=True)
            try:
                token, self._known = self._judge(bytes(asked.auth_bytes))
                self._guard.proofs += self._known
                fields = {"error_code": 0, "error_message": None, "auth_bytes": token, "session_lifetime_ms": self._guard.lifetime_ms}
            except PermissionError as refused:
                errno = SaslAuthenticationFailedError.errno
                fields = {"error_code": errno, "error_message": str(refused), "auth_bytes": b"", "session_lifetime_ms": 0}
            said = SaslAuthenticateResponse(**fields, version=version)
        else:
            return None
        said.with_header(asked.header.correlation_id)
        return bytes(said.encode(header=True, framed=True))

    def _judge(self, said: bytes) -> tuple[bytes, bool]:
        """The answer, and whether the client is known now. Raises `PermissionError`."""
        if self._scram is not None:
            return self._scram.step(said)
        if self._guard.mechanism == "PLAIN":
            _, user, password = said.decode().split("\0")
            if self._guard.passwords.get(user) != password:
                raise PermissionError("Authentication failed: Invalid username or password")
        elif said.split(b"auth=Bearer ")[-1].rstrip(b"\x01").decode() not in self._guard.tokens:
            raise PermissionError("invalid_token")
        return b"", True


class _Scram:
    """The server's side of one exchange."""

    def __init__(self, guard: Guard) -> None:
        self._passwords, self._hash = guard.passwords, HASHES[guard.mechanism or ""]
        self._said: list[str] = []
        self._salt, self._user = secrets.token_bytes(16), ""

    def step(self, said: bytes) -> tuple[bytes, bool]:
        """One message of the client's, and the answer."""
        if not self._said:
            first = said.decode().removeprefix("n,,")
            parts = _parts(first)
            self._user = parts["n"]
            server = f"r={parts['r']}{secrets.token_hex(12)},s={base64.b64encode(self._salt).decode()},i={ITERATIONS}"
            self._said = [first, server]
            return server.encode(), False
        bare, _, proof = said.decode().rpartition(",p=")
        message = ",".join([*self._said, bare]).encode()
        password = self._passwords.get(self._user, secrets.token_hex())
        salted = hashlib.pbkdf2_hmac(self._hash, password.encode(), self._salt, ITERATIONS)
        client_key = self._hmac(salted, b"Client Key")
        signature = self._hmac(hashlib.new(self._hash, client_key).digest(), message)
        expected = bytes(a ^ b for a, b in zip(client_key, signature, strict=True))
        if _parts(bare)["r"] != _parts(self._said[1])["r"] or not hmac.compare_digest(base64.b64decode(proof), expected):
            raise PermissionError("Authentication failed during authentication due to invalid credentials with SASL mechanism SCRAM")
        return b"v=" + base64.b64encode(self._hmac(self._hmac(salted, b"Server Key"), message)), True

    def _hmac(self, key: bytes, message: bytes) -> bytes:
        return hmac.new(key, message, self._hash).digest()


def _parts(message: str) -> dict[str, str]:
    return {name: value for name, _, value in (part.partition("=") for part in message.split(","))}


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(1 << 16):
        writer.write(piece)
        await writer.drain()


@dataclass(frozen=True)
class Certificates:
    """A certificate authority of one test, what it signed for the server of `localhost`, and for a client."""

    folder: Path

    @staticmethod
    def made(folder: Path) -> "Certificates":
        """All of them, as files."""
        folder.mkdir()
        authority_key, authority = _signed("an authority of a test", None, None)
        _write(folder / "ca.pem", authority, None)
        for name, alternative in (("server", "localhost"), ("client", None)):
            key, certificate = _signed(name, (authority_key, authority), alternative)
            _write(folder / f"{name}.pem", certificate, None)
            _write(folder / f"{name}.key", None, key)
        return Certificates(folder)

    def server(self, *, asks_clients: bool = False) -> ssl.SSLContext:
        """Of a server that has the certificate, and may ask clients for theirs."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.folder / "server.pem", self.folder / "server.key")
        if asks_clients:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(self.folder / "ca.pem")
        return context


def _signed(
    name: str, issuer: tuple[ec.EllipticCurvePrivateKey, x509.Certificate] | None, alternative: str | None
) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key, subject, now = ec.generate_private_key(ec.SECP256R1()), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]), utc_now()
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer[1].subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        # RFC 5280 asks for both of every certificate but a self-signed one, and Python 3.13 insists
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key((issuer[0] if issuer else key).public_key()), critical=False)
    )
    if issuer is None:
        signs = dict.fromkeys(("key_cert_sign", "crl_sign"), True)
        other = ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
        builder = builder.add_extension(
            x509.KeyUsage(**signs, **dict.fromkeys((*other, "encipher_only", "decipher_only"), False)), critical=True
        )
    if alternative is not None:
        builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(alternative)]), critical=False)
    return key, builder.sign(issuer[0] if issuer else key, hashes.SHA256())


def _write(file: Path, certificate: x509.Certificate | None, key: ec.EllipticCurvePrivateKey | None) -> None:
    if certificate is not None:
        file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    if key is not None:
        plain = serialization.NoEncryption()
        file.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain))
