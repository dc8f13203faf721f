"""Cases: compilation caching. A saved compilation is restored, and a changed one never is.

Owns the sixteen ways of the spec's suites, for floats and 8-bit integers, with their security part. A device that wants no cache
files is asked to prepare regardless and to refuse to restore; the rest is skipped.

Invariants:
1. Saving never makes a preparation fail, whatever is wrong with its cache arguments.
2. A restored model computes the same results as the saved one, or restoring fails.

Source: ``CompilationCachingTests`` of the NN HAL's VTS 1.3.
"""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from aionn.conformance.computing import closing
from aionn.conformance.vts.case import (
    Case,
    CaseSkipped,
    VtsSubject,
    expect_refusal,
    expect_status,
    fail,
    status_of_call,
)
from aionn.conformance.vts.models import RequestPools, chain_model
from aionn.errors import Error, ErrorStatus, status_of
from aionn.hal import (
    CACHE_TOKEN_BYTES,
    CacheFileCounts,
    CacheFiles,
    Model,
    OperandType,
    OperationType,
    PreparedModel,
    operand_dtype,
)

__all__ = ["CASES"]

TYPES = (OperandType.TENSOR_FLOAT32, OperandType.TENSOR_QUANT8_ASYMM)
SEEDS = range(10)
FAILURE = ErrorStatus.GENERAL_FAILURE
INVALID = ErrorStatus.INVALID_ARGUMENT

TOKEN = bytes(range(CACHE_TOKEN_BYTES))

RACE_LENGTH = 100
"""Operations of the model whose files are swapped while they are read or written: a call of some length."""

RACE_TURNS = 20
"""Number of repetitions; all runs do it 100 times, as the VTS does."""

OPERATIONS = {"add": OperationType.ADD, "mul": OperationType.MUL}


class Cached:
    """A model, its cache files and what is done with them; a folder of its own on disk.

    Args:
        subject: The device.
        kind: Type of the model's tensors.
        folder: Where the files are.
        operation: ``add`` (adds 1) or ``mul`` (multiplies by 1): two models that a mix-up would show of, at inputs of 1.
        length: Number of operations.
    """

    def __init__(
        self, subject: VtsSubject, kind: OperandType, folder: Path, operation: str = "add", length: int = 1
    ) -> None:
        self.subject = subject
        self.counts = subject.device.info.cache_files
        self.kind = kind
        self.operation = operation
        self.length = length
        self.model: Model = chain_model(length, kind, operation=OPERATIONS[operation], constant=1.0)
        self.models = [folder / f"{operation}-model-{i}" for i in range(self.counts.model)]
        self.data = [folder / f"{operation}-data-{i}" for i in range(self.counts.data)]
        for path in (*self.models, *self.data):
            path.touch()

    @contextlib.contextmanager
    def _open(self, paths: Sequence[Path], flags: int, offset: int) -> Iterator[list[int]]:
        fds = []
        try:
            for path in paths:
                fds.append(os.open(path, flags | os.O_CLOEXEC))
                os.lseek(fds[-1], offset, os.SEEK_SET)
            yield fds
        finally:
            for fd in fds:
                os.close(fd)

    async def save(
        self,
        *,
        models: Sequence[Path] | None = None,
        data: Sequence[Path] | None = None,
        flags: int = os.O_RDWR,
        offset: int = 0,
        token: bytes = TOKEN,
        where: str = "",
    ) -> None:
        """Prepares with these cache arguments; that must succeed, and the model must compute."""
        self.subject.step()
        with (
            self._open(self.models if models is None else models, flags, offset) as model_fds,
            self._open(self.data if data is None else data, flags, offset) as data_fds,
        ):
            try:
                prepared = await self.subject.device.prepare_model(
                    self.model, cache=CacheFiles(model_fds, data_fds, token)
                )
            except Error as e:
                fail("a prepared model, whatever is wrong with its cache", f"{status_of(e).name}: {e}", where)
            for fd in (*model_fds, *data_fds):
                os.fstat(fd)  # Descriptors stay the caller's.
        async with closing(prepared):
            await self.check(prepared, f"{where} the model that was saved")

    async def load(
        self,
        *,
        models: Sequence[Path] | None = None,
        data: Sequence[Path] | None = None,
        flags: int = os.O_RDWR,
        offset: int = 0,
        token: bytes = TOKEN,
    ) -> PreparedModel:
        """Restores. Raises as ``Device.prepare_model_from_cache``."""
        self.subject.step()
        with (
            self._open(self.models if models is None else models, flags, offset) as model_fds,
            self._open(self.data if data is None else data, flags, offset) as data_fds,
        ):
            return await self.subject.device.prepare_model_from_cache(CacheFiles(model_fds, data_fds, token))

    async def check(self, prepared: PreparedModel, where: str) -> None:
        """Ends the case as failed unless the prepared model computes what this one should."""
        start = 3
        expected = start + self.length if self.operation == "add" else start
        values = np.full((1, 4), start, operand_dtype(self.kind))
        with RequestPools(self.model, [values]) as pools:
            self.subject.step()
            await prepared.execute_synchronously(pools.request)
            if (self._real(pools) != expected).any():
                fail(f"{expected}", self._real(pools), where)

    def _real(self, pools: RequestPools) -> npt.NDArray[np.float64]:
        output = self.model.main.outputs[0]
        return pools.output().astype(np.float64) * (output.scale or 1.0)

    async def check_restored(self, where: str = "restored") -> None:
        """Restores, which must succeed, and computes."""
        prepared = await self.load()
        async with closing(prepared):
            await self.check(prepared, where)

    async def maybe_restored(self, call: Awaitable[PreparedModel], where: str) -> bool:
        """Restoring may fail; a model that comes of it must compute what the saved one did."""
        try:
            prepared = await call
        except Error as e:
            expect_status(status_of(e), str(e), (FAILURE, INVALID), where)
            return False
        async with closing(prepared):
            await self.check(prepared, where)
        return True

    async def not_restored(
        self, call: Awaitable[PreparedModel], where: str, allowed: Sequence[ErrorStatus] = (FAILURE,)
    ) -> None:
        """Restoring must fail."""
        await expect_refusal(call, where, allowed=allowed)


@contextlib.asynccontextmanager
async def _cached(
    subject: VtsSubject,
    kind: OperandType,
    operation: str = "add",
    length: int = 1,
    folder: Path | None = None,
) -> AsyncIterator[Cached]:
    if subject.device.info.cache_files == CacheFileCounts():
        raise CaseSkipped("the device wants no cache files")
    with tempfile.TemporaryDirectory(prefix="aionn-vts-") as name:
        cached = Cached(subject, kind, folder or Path(name), operation, length)
        await subject.check_support(cached.model)
        yield cached


async def _unsupported(subject: VtsSubject) -> None:
    """A device that wants no cache files prepares all the same, whatever files it is given, and restores nothing."""
    if subject.device.info.cache_files != CacheFileCounts():
        raise CaseSkipped("the device caches")
    with tempfile.TemporaryDirectory(prefix="aionn-vts-") as name:
        cached = Cached(subject, TYPES[0], Path(name))
        await subject.check_support(cached.model)
        path = Path(name) / "file"
        path.touch()
        await cached.save()
        await cached.save(models=[path])
        await cached.not_restored(cached.load(), "no files")
        await cached.not_restored(cached.load(models=[path]), "a file", (FAILURE, INVALID))


async def _saves_and_restores(subject: VtsSubject, kind: OperandType) -> None:
    async with _cached(subject, kind, length=3) as cached:
        await cached.not_restored(cached.load(), "empty files", (FAILURE, INVALID))
        await cached.save()
        await cached.check_restored()
        await cached.check_restored("restored twice")
        await cached.save(where="saved again over the old")
        await cached.check_restored("restored after saving again")


async def _non_zero_offset(subject: VtsSubject, kind: OperandType) -> None:
    """Files hold old bytes, and their offsets are anywhere."""
    async with _cached(subject, kind) as cached:
        for path in (*cached.models, *cached.data):
            path.write_bytes(b"\xee" * 100_000)
        await cached.save(offset=1234)
        prepared = await cached.load(offset=7)
        async with closing(prepared):
            await cached.check(prepared, "restored")
        await cached.check_restored("restored from the start")


async def _invalid_counts(subject: VtsSubject, kind: OperandType, *, saving: bool) -> None:
    """A file less or more, in either list."""
    async with _cached(subject, kind) as cached:
        extra = cached.models[0].parent / "extra" if cached.models else cached.data[0].parent / "extra"
        extra.touch()
        if not saving:
            await cached.save()
        wrong: list[tuple[str, list[Path], list[Path]]] = [
            ("a model file more", [*cached.models, extra], cached.data),
            ("a data file more", cached.models, [*cached.data, extra]),
            ("33 model files", [*cached.models, *[extra] * 33], cached.data),
        ]
        if cached.models:
            wrong.append(("a model file less", cached.models[:-1], cached.data))
        if cached.data:
            wrong.append(("a data file less", cached.models, cached.data[:-1]))
        for where, models, data in wrong:
            if saving:
                await cached.save(models=models, data=data, where=where)
                await cached.maybe_restored(cached.load(), f"{where}, restored")
            else:
                call = cached.load(models=models, data=data)
                await cached.not_restored(call, where, (FAILURE, INVALID))


async def _invalid_descriptors(subject: VtsSubject, kind: OperandType, *, saving: bool) -> None:
    """Descriptors that are not files: closed ones, none at all, a pipe, a folder."""
    async with _cached(subject, kind) as cached:
        await cached.save()
        closed = os.open("/dev/null", os.O_RDONLY)
        os.close(closed)
        ends = os.pipe()
        folder = os.open("/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for where, fd in (("closed", closed), ("-1", -1), ("a pipe", ends[0]), ("a folder", folder)):
                cache = CacheFiles([fd] * cached.counts.model, [fd] * cached.counts.data, TOKEN)
                subject.step()
                if saving:
                    status, words = await status_of_call(
                        subject.device.prepare_model(cached.model, cache=cache)
                    )
                    expect_status(status, words, [ErrorStatus.NONE], where)
                else:
                    call = subject.device.prepare_model_from_cache(cache)
                    await cached.not_restored(call, where, (FAILURE, INVALID))
        finally:
            for fd in (*ends, folder):
                os.close(fd)


async def _invalid_access_mode(subject: VtsSubject, kind: OperandType, *, saving: bool) -> None:
    """Files that cannot be written when saving, or not be read when restoring."""
    async with _cached(subject, kind) as cached:
        if saving:
            await cached.save(flags=os.O_RDONLY)
            await cached.not_restored(cached.load(), "after saving into read-only files", (FAILURE, INVALID))
        else:
            await cached.save()
            await cached.not_restored(cached.load(flags=os.O_WRONLY), "write-only files")


async def _token_length(subject: VtsSubject, kind: OperandType) -> None:
    """A token has 32 bytes: another length is the caller's mistake when restoring, and ignored when saving."""
    async with _cached(subject, kind) as cached:
        for token in (b"", TOKEN[:-1], TOKEN + b"\0"):
            await cached.save(token=token, where=f"a token of {len(token)} bytes")
            await cached.not_restored(cached.load(token=token), f"a token of {len(token)} bytes", (INVALID,))


async def _swapped_in_mid_call(subject: VtsSubject, kind: OperandType, *, saving: bool) -> None:
    """The case writes a second model's files over those of the first during the call; no mixture may ever compute."""
    turns = RACE_TURNS if subject.mutants_max is not None else 100
    async with (
        _cached(subject, kind, "add", RACE_LENGTH) as first,
        _cached(subject, kind, "mul", RACE_LENGTH) as second,
    ):
        _need(first.models)
        await second.save(token=_other_token(first))
        others = [path.read_bytes() for path in second.models]
        for turn in range(turns):
            if not saving:
                await first.save()
            stop = threading.Event()

            def swap(stop: threading.Event = stop) -> None:
                while not stop.is_set():
                    for path, content in zip(first.models, others, strict=True):
                        path.write_bytes(content)

            thread = threading.Thread(target=swap, name="aionn-conformance-swap")
            thread.start()
            try:
                if saving:
                    await first.save()
                else:
                    await first.maybe_restored(first.load(), f"turn {turn}, restored concurrently")
            finally:
                stop.set()
                thread.join()
            if saving:
                await first.maybe_restored(first.load(), f"turn {turn}, restored afterwards")


async def _replaced_model_cache(subject: VtsSubject, kind: OperandType) -> None:
    """The model files of another saved model, valid in themselves, are not taken for this one's."""
    async with _cached(subject, kind, "add") as first, _cached(subject, kind, "mul") as second:
        _need(first.models)
        await first.save()
        await second.save(token=_other_token(first))
        for mine, others in zip(first.models, second.models, strict=True):
            mine.write_bytes(others.read_bytes())
        await first.not_restored(first.load(), "another model's files")


def _other_token(cached: Cached) -> bytes:
    """The token of a second model whose model files are put in place of the first's.

    The same one, as long as data files remain that distinguish the two; without them, nothing else than the token could.
    """
    return TOKEN if cached.data else TOKEN[::-1]


def _need(paths: Sequence[Path]) -> None:
    if not paths:
        raise CaseSkipped("the device wants no such cache files")


def _corrupt(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    if content:
        for _ in range(rng.randint(1, 3)):
            content[rng.randrange(len(content))] ^= rng.randint(1, 255)
        path.write_bytes(content)


def _resize(path: Path, rng: random.Random) -> None:
    content = path.read_bytes()
    if content and rng.random() < 0.5:
        path.write_bytes(content[: rng.randrange(len(content))])
    else:
        path.write_bytes(content + rng.randbytes(rng.randint(1, 64)))


async def _tampered(
    subject: VtsSubject, kind: OperandType, *, tamper: Callable[[Path, random.Random], None], of_model: bool
) -> None:
    """A model file that was changed is refused; a data file that was must not bring the driver down."""
    async with _cached(subject, kind) as cached:
        paths = cached.models if of_model else cached.data
        _need(paths)
        for seed in SEEDS:
            rng = random.Random(seed)
            await cached.save()
            path = rng.choice(paths)
            before = path.read_bytes()
            tamper(path, rng)
            if path.read_bytes() == before:
                continue
            if of_model:
                await cached.not_restored(cached.load(), f"seed {seed}")
            else:
                status, words = await status_of_call(cached.load(), f"seed {seed}")
                expect_status(status, words, (ErrorStatus.NONE, FAILURE, INVALID), f"seed {seed}")
        await cached.save()
        await cached.check_restored("saved and restored afterwards")


async def _wrong_token(subject: VtsSubject, kind: OperandType) -> None:
    """A token that differs in one bit restores nothing."""
    async with _cached(subject, kind) as cached:
        _need(cached.models)
        await cached.save()
        for seed in SEEDS:
            rng = random.Random(seed)
            token = bytearray(TOKEN)
            token[rng.randrange(len(token))] ^= 1 << rng.randrange(8)
            await cached.not_restored(cached.load(token=bytes(token)), f"seed {seed}")
        await cached.check_restored("restored with the right token")


BODIES: dict[str, Callable[..., Awaitable[None]]] = {
    "save_and_restore": _saves_and_restores,
    "save_and_restore_at_offset": _non_zero_offset,
    "save_to_wrong_count": partial(_invalid_counts, saving=True),
    "restore_from_wrong_count": partial(_invalid_counts, saving=False),
    "save_to_wrong_descriptor": partial(_invalid_descriptors, saving=True),
    "restore_from_wrong_descriptor": partial(_invalid_descriptors, saving=False),
    "save_to_wrong_access_mode": partial(_invalid_access_mode, saving=True),
    "restore_from_wrong_access_mode": partial(_invalid_access_mode, saving=False),
    "token_length": _token_length,
    "save_while_swapped": partial(_swapped_in_mid_call, saving=True),
    "restore_while_swapped": partial(_swapped_in_mid_call, saving=False),
    "replaced_model_cache": _replaced_model_cache,
    "corrupted_model_cache": partial(_tampered, tamper=_corrupt, of_model=True),
    "wrong_length_model_cache": partial(_tampered, tamper=_resize, of_model=True),
    "wrong_token": _wrong_token,
    "corrupted_data_cache": partial(_tampered, tamper=_corrupt, of_model=False),
    "wrong_length_data_cache": partial(_tampered, tamper=_resize, of_model=False),
}

CASES = (
    Case("caching/unsupported_is_refused", _unsupported),
    *(
        Case(f"caching/{name}[{kind.name.lower()}]", partial(body, kind=kind))
        for name, body in BODIES.items()
        for kind in TYPES
    ),
)
