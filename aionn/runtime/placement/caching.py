"""Compilation caches in a directory: which files belong to which step, and how they come into being.

Owns tokens, file names, and the files' life; the driver (``aionn.drivers.kit.caching``) defines their content, and checks that it
is unchanged.

Invariants:
1. Equal tokens mean equal work: the caller's token, the step, the device with its version, preference, priority and aionn's version
   all take part.
2. Nothing that is wrong with a directory or a file fails a compilation: then it is made anew, and not kept, with one warning; where
   a driver cannot write its files, with one for each step.
3. A file is in its place only when it is whole: it is written beside it and renamed. Links are not followed.

Source: compilation caching of the NN HAL's runtime (``ExecutionPlan``, ``CompilationBuilder``).
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import secrets
import stat
import struct
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import anyio.to_thread

from aionn.errors import Error, InvalidArgument, MissedDeadline, class_text
from aionn.hal import (
    CACHE_TOKEN_BYTES,
    CacheFileCounts,
    CacheFiles,
    ExecutionPreference,
    Model,
    PreparedModel,
    PreparedModelDefaults,
    Priority,
    check_abilities,
)
from aionn.observability.tracing import section
from aionn.platform.files import open_regular
from aionn.platform.loops import finish
from aionn.platform.real_work import real_work
from aionn.runtime.devices import RuntimeDevice

__all__ = ["StepCache", "derive_token", "file_names", "open_cache"]

_logger = logging.getLogger("aionn.compilation")

PLAN_BYTES_MAX = 64 << 20
"""Largest plan that is kept: the structure of a model without its constants, at some 100 bytes an operand."""

_PLAN_FORM = 1
_PLAN_DIGEST_BYTES = 32
_FILE_MODE = 0o600
_DIRECTORY_MODE = 0o700


def derive_token(
    token: bytes,
    *,
    device: str,
    version: str,
    preference: ExecutionPreference,
    priority: Priority,
    operations: Sequence[int] | None,
) -> bytes:
    """The token of one step.

    Args:
        token: The caller's.
        device: The device's name.
        version: Its driver's version; a driver that changes must change it.
        preference: The compilation's.
        priority: The compilation's.
        operations: The step's, by index in the whole model; None where the whole model is one step.
    """
    digest = hashlib.sha256(token)
    for text in (device, version):
        encoded = text.encode()
        digest.update(struct.pack("<I", len(encoded)) + encoded)
    digest.update(struct.pack("<iii", preference, priority, -1 if operations is None else len(operations)))
    for operation in operations or ():
        digest.update(struct.pack("<I", operation))
    return digest.digest()


def file_names(token: bytes, counts: CacheFileCounts) -> tuple[list[str], list[str]]:
    """The names of a step's model and data files: 64 letters of its token, the kind (1 or 2), the number."""
    letters = "".join(chr(ord("A") + (byte & 15)) + chr(ord("A") + (byte >> 4)) for byte in token)
    return (
        [f"{letters}1{index}" for index in range(counts.model)],
        [f"{letters}2{index}" for index in range(counts.data)],
    )


async def open_cache(
    directory: str | os.PathLike[str] | None,
    token: bytes | None,
    model: Model | str | os.PathLike[str],
    described: bytes = b"",
) -> StepCache | None:
    """The cache for a compilation; None without a directory.

    Args:
        directory: Where the files are; made if it is missing.
        token: 32 bytes that stand for the model; None takes a digest of it.
        model: The model to compile, or the path of its file.
        described: Other properties that identify the compilation, such as the options of its import.

    Raises:
        InvalidArgument: There is a token without a directory, it has another length, or the directory is not a path.
    """
    if directory is not None:
        if not isinstance(directory, str | os.PathLike):
            raise InvalidArgument(f"cache_dir: expected a path, got {directory!r}")
        # An empty path would be the working directory.
        if not os.fspath(directory):
            raise InvalidArgument("cache_dir: expected a path, got an empty text; None keeps no cache")
        try:
            is_path = b"\0" not in os.fsencode(directory)
        except UnicodeEncodeError:
            is_path = False
        if not is_path:
            raise InvalidArgument(f"cache_dir: expected a path, got {directory!r}")
    if token is not None and (not isinstance(token, bytes) or len(token) != CACHE_TOKEN_BYTES):
        got = f"{len(token)} bytes" if isinstance(token, bytes) else class_text(token)
        raise InvalidArgument(f"cache_token: expected {CACHE_TOKEN_BYTES} bytes, got {got}")
    if directory is None:
        if token is not None:
            raise InvalidArgument("cache_token: expected a cache_dir beside it")
        return None
    path = Path(directory)
    source = None
    if token is not None:
        identity = token
    else:
        with real_work("reading a model"):
            identity, source = await anyio.to_thread.run_sync(_digest, model, abandon_on_cancel=True)
    # An importer and a lowering may change with each version. The package is imported before its modules, which may not import it.
    version = hashlib.sha256(str(sys.modules["aionn"].__version__).encode()).digest()
    return StepCache(path, hashlib.sha256(identity + version + described).digest(), source)


def _state_of(status: os.stat_result) -> tuple[int, ...]:
    """Numbers of a file that change with its content."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _digest(model: Model | str | os.PathLike[str]) -> tuple[bytes, tuple[int, ...] | None]:
    """The digest of a model, and the state of its file before that was read."""
    digest = hashlib.sha256()
    if isinstance(model, Model):
        # Structs of numbers and tuples: their text contains all of them, in the order of their fields.
        digest.update(repr((model.main, model.referenced, model.extension_name_to_prefix)).encode())
        digest.update(b"\1" if model.relax_computation_float32_to_float16 else b"\0")
        digest.update(model.operand_values)
        for pool in model.pools:
            digest.update(struct.pack("<Q", pool.size_bytes))
            digest.update(pool.array.data)
    else:
        with open_regular(model, "model") as file:
            try:
                state = _state_of(os.fstat(file.fileno()))
                return hashlib.file_digest(file, "sha256").digest(), state
            except OSError as e:
                raise InvalidArgument(f"model {os.fsdecode(model)}: cannot be read: {e.strerror}") from e
    return digest.digest(), None


class StepCache:
    """The prepared steps that are kept in a directory under one token.

    Attributes:
        directory: Where the files are.
        used: Whether every step so far came from it; None before the first.
    """

    def __init__(self, directory: Path, token: bytes, source: tuple[int, ...] | None = None) -> None:
        self.directory = directory
        self.used: bool | None = None
        self._token = token
        self._source = source
        self._is_reported = False

    async def is_for(self, model: object) -> bool:
        """Whether the token stands for a model that has been imported since.

        A file that another process has replaced in between is another model, which must neither come from here nor be kept here.
        """
        source = self._source
        if source is None or not isinstance(model, str | os.PathLike):
            return True

        def read() -> bool:
            try:
                return _state_of(os.stat(model)) == source
            except OSError:
                return False

        with real_work("reading a model"):
            return await anyio.to_thread.run_sync(read)

    def _report(self, error: OSError) -> None:
        """Warns that nothing is kept: once for a compilation, of which each step has files of its own."""
        level = logging.DEBUG if self._is_reported else logging.WARNING
        self._is_reported = True
        _logger.log(level, "the compilation is not kept: %s: %s", self.directory, error.strerror or error)

    def _plan_path(self, devices: Sequence[RuntimeDevice], choice: tuple[int, ...]) -> tuple[Path, bytes]:
        """The file of the plan over these devices, and the key of its digest."""
        digest = hashlib.sha256(self._token + b"plan")
        for device in devices:
            said = (device.name, device.driver, device.version, device.feature_level, device.capabilities)
            digest.update(repr(said).encode())
        digest.update(repr((_PLAN_FORM, choice)).encode())
        key = digest.digest()
        letters = file_names(key, CacheFileCounts(1, 0))[0][0][:-2]
        return self.directory / f"{letters}0", key

    async def read_plan(self, devices: Sequence[RuntimeDevice], choice: tuple[int, ...]) -> bytes | None:
        """The plan that was kept for a model on these devices; None if it is missing, or was changed.

        Args:
            devices: All that were asked, in their order.
            choice: Preference and priority.
        """
        path, key = self._plan_path(devices, choice)

        def read() -> bytes | None:
            try:
                with open(
                    os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK), "rb"
                ) as file:
                    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                        return None
                    data = file.read(PLAN_BYTES_MAX)
            except OSError:
                return None
            plan = data[_PLAN_DIGEST_BYTES:]
            is_whole = hmac.compare_digest(_plan_digest(key, plan), data[:_PLAN_DIGEST_BYTES])
            return plan if is_whole else None

        with real_work("reading a plan"):
            return await anyio.to_thread.run_sync(read)

    async def write_plan(
        self, devices: Sequence[RuntimeDevice], choice: tuple[int, ...], plan: bytes
    ) -> None:
        """Keeps a plan; faults of the directory are only logged."""
        path, key = self._plan_path(devices, choice)

        def write() -> None:
            temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                with open(os.open(temporary, flags, _FILE_MODE), "wb") as file:
                    file.write(_plan_digest(key, plan) + plan)
                os.rename(temporary, path)
            except OSError as e:
                self._report(e)
                with contextlib.suppress(OSError):
                    temporary.unlink()

        if len(plan) + _PLAN_DIGEST_BYTES <= PLAN_BYTES_MAX:
            with real_work("keeping a plan"):
                await anyio.to_thread.run_sync(write)

    async def prepare(
        self,
        device: RuntimeDevice,
        model: Model,
        operations: tuple[int, ...] | None,
        preference: ExecutionPreference,
        priority: Priority,
        deadline_ns: int | None,
    ) -> PreparedModel:
        """Makes a step ready: from the cache if it is there, else anew, and keeps it. Raises as ``Device.prepare_model``."""
        counts = device.info.cache_files
        if not counts.model:
            # Files of constants alone could not be distinguished from changed ones: the digest is in the first model file.
            self.used = False
            return await device.hal.prepare_model(
                model, preference=preference, priority=priority, deadline_ns=deadline_ns
            )
        restored = await self.restore(device, operations, preference, priority, deadline_ns)
        if restored is not None:
            return restored
        token = self._step_token(device, operations, preference, priority)
        writing = _Writing(self, token, counts)
        try:
            # A cancelled caller waits for the thread: what it opens is closed here.
            files = await finish(anyio.to_thread.run_sync(writing.begin))
            prepared = await device.hal.prepare_model(
                model, preference=preference, priority=priority, deadline_ns=deadline_ns, cache=files
            )
            if files is not None:
                await finish(anyio.to_thread.run_sync(writing.keep))
            return prepared
        finally:
            writing.drop()

    def _step_token(
        self,
        device: RuntimeDevice,
        operations: tuple[int, ...] | None,
        preference: ExecutionPreference,
        priority: Priority,
    ) -> bytes:
        return derive_token(
            self._token,
            device=device.name,
            version=device.version,
            preference=preference,
            priority=priority,
            operations=operations,
        )

    async def restore(
        self,
        device: RuntimeDevice,
        operations: tuple[int, ...] | None,
        preference: ExecutionPreference,
        priority: Priority,
        deadline_ns: int | None,
    ) -> PreparedModel | None:
        """A step from the cache; None if it is not there, or cannot be used.

        Raises:
            MissedDeadline: The deadline passed.
        """
        token = self._step_token(device, operations, preference, priority)
        with contextlib.ExitStack() as stack:
            try:
                files = stack.enter_context(_opened(self.directory, token, device.info.cache_files))
                with section("LI_PC", f"from cache on {device.name}"):
                    prepared = await device.hal.prepare_model_from_cache(
                        files, priority=priority, deadline_ns=deadline_ns
                    )
                check_abilities(prepared, PreparedModelDefaults, device.name)
                self.used = self.used is not False
                return prepared
            except MissedDeadline:
                raise
            except FileNotFoundError:
                pass
            except (OSError, Error) as e:
                _logger.info("%s: the kept compilation is not used: %s", device.name, e)
        self.used = False
        return None


def _plan_digest(key: bytes, plan: bytes) -> bytes:
    return hashlib.blake2b(plan, key=key, digest_size=_PLAN_DIGEST_BYTES).digest()


@contextlib.contextmanager
def _opened(directory: Path, token: bytes, counts: CacheFileCounts) -> Iterator[CacheFiles]:
    with contextlib.ExitStack() as stack:

        def opened(names: Sequence[str]) -> list[int]:
            fds = []
            for name in names:
                # Flags against links and pipes without a writer: links are rejected, and pipes do not block.
                flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
                fds.append(os.open(directory / name, flags))
                stack.callback(os.close, fds[-1])
            return fds

        model, data = (opened(names) for names in file_names(token, counts))
        yield CacheFiles(model, data, token)


class _Writing:
    """New files beside the places where they will be."""

    def __init__(self, cache: StepCache, token: bytes, counts: CacheFileCounts) -> None:
        self._cache = cache
        self._token = token
        self._counts = counts
        self._fds: list[int] = []
        self._paths: list[tuple[Path, Path]] = []

    def begin(self) -> CacheFiles | None:
        """Creates the files; None if they cannot be created there, which the cache then reports. Blocks."""
        directory = self._cache.directory
        model_names, data_names = file_names(self._token, self._counts)
        suffix = f".{secrets.token_hex(8)}"
        try:
            directory.mkdir(mode=_DIRECTORY_MODE, parents=True, exist_ok=True)
            for name in (*model_names, *data_names):
                temporary = directory / (name + suffix)
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                self._fds.append(os.open(temporary, flags, _FILE_MODE))
                self._paths.append((temporary, directory / name))
        except OSError as e:
            self._cache._report(e)
            return None
        count = self._counts.model
        return CacheFiles(self._fds[:count], self._fds[count:], self._token)

    def keep(self) -> None:
        """Puts the files into their places, if the driver wrote something. Blocks."""
        try:
            if os.fstat(self._fds[0]).st_size:
                for temporary, path in self._paths:
                    os.rename(temporary, path)
        except OSError as e:
            self._cache._report(e)

    def drop(self) -> None:
        """Closes the files, and removes those that were not put into their places."""
        for fd in self._fds:
            os.close(fd)
        for temporary, _ in self._paths:
            with contextlib.suppress(OSError):
                temporary.unlink()
