"""RealtimeKit, a service that grants real-time scheduling to programs without privileges: desktops run it for sound.

Only this module imports jeepney (the extra ``realtimekit``). Every wait has a time-out, including the first greeting: jeepney's own
connection would wait without a limit for a bus that accepts connections and never answers.

Source: the README of RealtimeKit (org.freedesktop.RealtimeKit1); the D-Bus specification.
"""

from __future__ import annotations

import resource
import socket
import time
from typing import TYPE_CHECKING, Any

import msgspec

from aionn.realtime.remedies import Cause

if TYPE_CHECKING:
    from jeepney import Message

__all__ = ["Offer", "Unavailable", "ask_realtimekit", "make_realtime"]

ANSWER_S = 1.0
"""Time-out of one exchange with RealtimeKit: it answers in a millisecond, but may have to start polkit first."""

MESSAGES_MAX = 64
"""Most other messages that are skipped before an answer: a bus sends one signal after the greeting."""

RTTIME_US_MAX = 200_000
"""Largest RLIMIT_RTTIME that is set: RealtimeKit's default, used where it publishes no limit."""

NAME = "org.freedesktop.RealtimeKit1"
OBJECT = "/org/freedesktop/RealtimeKit1"


class Offer(msgspec.Struct, frozen=True):
    """The limits within which RealtimeKit grants real-time scheduling.

    Attributes:
        priority_max: Highest priority of SCHED_RR.
        rttime_us_max: Largest RLIMIT_RTTIME that the process may have, in microseconds.
    """

    priority_max: int
    rttime_us_max: int


class Unavailable(msgspec.Struct, frozen=True):
    """The reason why RealtimeKit cannot be used.

    Attributes:
        cause: The cause, as an enumerator.
        sentence: The cause, as a sentence.
    """

    cause: Cause
    sentence: str


class _Failed(Exception):
    """An exchange failed."""

    def __init__(self, cause: Cause, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = Unavailable(cause, sentence)


def ask_realtimekit(timeout_s: float = ANSWER_S) -> Offer | Unavailable:
    """Ask RealtimeKit for its limits.

    Args:
        timeout_s: Time-out of the whole exchange.

    Returns:
        The limits, or the reason why RealtimeKit cannot be used.
    """
    try:
        with _Connection(timeout_s) as bus:
            priority = bus.property("MaxRealtimePriority")
            rttime = bus.property("RTTimeUSecMax")
    except _Failed as e:
        return e.reason
    return Offer(priority, min(rttime, RTTIME_US_MAX) if rttime > 0 else RTTIME_US_MAX)


def make_realtime(
    offer: Offer, pid: int, tid: int, priority: int, timeout_s: float = ANSWER_S
) -> Unavailable | None:
    """Schedule a thread under SCHED_RR with SCHED_RESET_ON_FORK. Lowers RLIMIT_RTTIME of this process first, permanently, since
    RealtimeKit requires it.

    Args:
        offer: The limits of RealtimeKit.
        pid: The thread's process: this one, or a child, which has inherited the limit.
        tid: The thread.
        priority: At most ``offer.priority_max``.
        timeout_s: Time-out of the whole exchange.

    Returns:
        None means success; otherwise the reason for the failure.
    """
    most = offer.rttime_us_max
    try:
        soft, hard = resource.getrlimit(resource.RLIMIT_RTTIME)
        if not (0 <= hard <= most and 0 <= soft <= most):
            new = min(hard, most) if hard >= 0 else most
            resource.setrlimit(resource.RLIMIT_RTTIME, (min(soft, new) if soft >= 0 else new, new))
    except (OSError, ValueError) as e:  # Python makes a ValueError of a sandbox's EPERM.
        return Unavailable(Cause.FILTERED, f"RLIMIT_RTTIME cannot be lowered, as it requires ({e})")
    try:
        with _Connection(timeout_s) as bus:
            bus.call(NAME, OBJECT, NAME, "MakeThreadRealtimeWithPID", "ttu", (pid, tid, priority))
    except _Failed as e:
        return e.reason
    return None


class _Connection:
    """A connection to the system bus; all waits together end at the time-out."""

    def __init__(self, timeout_s: float) -> None:
        self._until_s = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self._serial = 0
        try:
            from jeepney import Parser
            from jeepney.bus import get_bus
            from jeepney.io.blocking import prep_socket
        except ImportError:
            raise _Failed(
                Cause.ABSENT, "jeepney is not installed: pip install 'aionn[realtimekit]'"
            ) from None
        try:
            address = get_bus("SYSTEM")
        except (RuntimeError, ValueError, StopIteration) as e:
            raise _Failed(Cause.ABSENT, f"the address of the system bus cannot be parsed ({e})") from None
        try:
            self._socket: socket.socket = prep_socket(address, timeout=timeout_s)
        except TimeoutError:
            raise self._slow() from None
        except OSError as e:
            raise _Failed(Cause.ABSENT, f"no system bus can be reached ({e.strerror or e})") from None
        except Exception as e:
            # jeepney raises exceptions of several types when the bus rejects the connection.
            raise _Failed(Cause.REFUSED, f"the system bus rejects the connection ({e!s:.120})") from None
        self._parser = Parser()

    def __enter__(self) -> _Connection:
        try:
            self.call("org.freedesktop.DBus", "/org/freedesktop/DBus", "org.freedesktop.DBus", "Hello")
        except BaseException:
            self._socket.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def property(self, name: str) -> int:
        """The value of a numeric property of RealtimeKit."""
        body = self.call(NAME, OBJECT, "org.freedesktop.DBus.Properties", "Get", "ss", (NAME, name))
        match body:
            case ((str(), int(value)),):
                return value
            case _:
                raise _Failed(Cause.FAILED, f"{name}: expected a number, got {body!r:.80}")

    def call(
        self,
        name: str,
        path: str,
        interface: str,
        method: str,
        signature: str | None = None,
        body: tuple[Any, ...] = (),
    ) -> tuple[Any, ...]:
        """The body of the answer to a call.

        Raises:
            _Failed: The bus or RealtimeKit rejects the call, or does not answer in time.
        """
        from jeepney import DBusAddress, HeaderFields, MessageType, new_method_call

        message = new_method_call(DBusAddress(path, name, interface), method, signature, body)
        self._serial += 1
        try:
            self._socket.settimeout(self._left_s())
            self._socket.sendall(message.serialise(serial=self._serial))
            for _ in range(MESSAGES_MAX):
                reply = self._receive()
                if reply.header.fields.get(HeaderFields.reply_serial) != self._serial:
                    continue
                answer: tuple[Any, ...] = reply.body
                if reply.header.message_type is MessageType.error:
                    raise self._refused(str(reply.header.fields.get(HeaderFields.error_name)), answer)
                return answer
        except TimeoutError:
            raise self._slow() from None
        except OSError as e:
            raise _Failed(Cause.FAILED, f"the system bus ended the connection ({e.strerror or e})") from None
        raise _Failed(Cause.FAILED, f"no answer among {MESSAGES_MAX} messages")

    def _receive(self) -> Message:
        while True:
            try:
                message = self._parser.get_next_message()
            except Exception as e:
                raise _Failed(Cause.FAILED, f"the system bus sent no D-Bus message ({e!s:.120})") from None
            if message is not None:
                return message
            self._socket.settimeout(self._left_s())
            data = self._socket.recv(4096)
            if not data:
                raise ConnectionResetError("the connection ended")
            self._parser.add_data(data)

    def _left_s(self) -> float:
        left_s = self._until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        return left_s

    def _slow(self) -> _Failed:
        return _Failed(Cause.SLOW, f"no answer within {self._timeout_s:g} s")

    @staticmethod
    def _refused(name: str, body: tuple[Any, ...]) -> _Failed:
        text = str(body[0])[:200] if body else name
        if name.endswith(
            (".ServiceUnknown", ".NameHasNoOwner", ".Spawn.ExecFailed", ".Spawn.ServiceNotFound")
        ):
            return _Failed(Cause.ABSENT, f"it is not installed or cannot be started ({text})")
        if name.endswith((".NoReply", ".Timeout", ".TimedOut")):
            return _Failed(Cause.SLOW, f"it does not answer ({text})")
        return _Failed(Cause.REFUSED, f"it rejects the request ({text})")
