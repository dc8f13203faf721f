"""The bytes of a client of gRPC that gives no window of HTTP/2 for answers."""

from __future__ import annotations

from aionn.oip.grpc_server import SERVICE

__all__ = ["calls_without_a_window"]


def _frame(kind: int, flags: int, stream: int, content: bytes) -> bytes:
    """A frame of HTTP/2 (RFC 9113, 4.1)."""
    return len(content).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + content


def _header(name: str, value: str) -> bytes:
    """A literal header without indexing (RFC 7541, 6.2.2)."""
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


def calls_without_a_window(method: str, count: int) -> bytes:
    """A connection that announces an initial window of 0 bytes, and unary calls with empty requests on it."""
    headers = b"".join(
        _header(name, value)
        for name, value in {
            ":method": "POST",
            ":scheme": "http",
            ":path": f"/{SERVICE}/{method}",
            ":authority": "localhost",
            "te": "trailers",
            "content-type": "application/grpc",
        }.items()
    )
    pieces = [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", _frame(4, 0, 0, bytes([0, 4, 0, 0, 0, 0]))]
    for stream in range(1, 2 * count, 2):
        pieces += [_frame(1, 4, stream, headers), _frame(0, 1, stream, bytes(5))]
    return b"".join(pieces)
