"""Data with known answers: what is found in a folder, what a model gets of it, and which mistakes are named."""

from __future__ import annotations

import wave
from pathlib import Path

import msgspec
import numpy as np
import pytest

import aionn
from aionn.benchmarking.evaluators import Evaluation, Evaluator
from aionn.benchmarking.labelled import Sample, find_samples, read_sample
from aionn.benchmarking.measures import KnownData, check_known, evaluate
from aionn.errors import InvalidArgument
from aionn.hal import Model, Operand, OperandLifeTime, OperandType, OperationType
from aionn.media import LogMel
from aionn.models.builder import GraphBuilder
from aionn.models.tflite import load_tflite

PIXELS = (0.0, 1.0)


def operand(
    *shape: int, kind: OperandType = OperandType.TENSOR_FLOAT32, scale: float = 0.0, zero: int = 0
) -> Operand:
    return Operand(kind, shape, scale=scale, zero_point=zero, lifetime=OperandLifeTime.SUBGRAPH_INPUT)


def write_ppm(path: Path, pixels: np.ndarray) -> None:
    height, width, _ = pixels.shape
    path.write_bytes(b"P6 %d %d 255\n" % (width, height) + pixels.astype(np.uint8).tobytes())


def write_wav(path: Path, samples: np.ndarray) -> None:
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        file.writeframes((samples * 32767).astype("<i2").tobytes())


def test_folders_are_classes_by_number_or_by_name(tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_text("cat\ndog\n")
    for folder, name in (("dog", "b.png"), ("dog", "a.jpg"), ("0", "c.npy")):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / name).touch()
    found = find_samples(tmp_path, "top-k")
    assert [(sample.path.name, sample.label) for sample in found] == [
        ("c.npy", 0),
        ("a.jpg", 1),
        ("b.png", 1),
    ]


def test_sequences_come_with_their_right_outputs(tmp_path: Path) -> None:
    for name in ("one.npy", "one.expected.npy", "two.npy", "two.expected.npy"):
        (tmp_path / name).touch()
    assert [s.path.name for s in find_samples(tmp_path, "phone-error")] == ["one.npy", "two.npy"]
    (tmp_path / "two.expected.npy").unlink()
    with pytest.raises(InvalidArgument, match=r"two\.npy: expected its right outputs in two\.expected\.npy"):
        find_samples(tmp_path, "phone-error")


def test_what_has_no_right_answer_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="expected a folder"):
        find_samples(tmp_path / "missing", "top-k")
    with pytest.raises(InvalidArgument, match="expected 1 to 100000 samples, got 0"):
        find_samples(tmp_path, "top-k")
    (tmp_path / "bird").mkdir()
    with pytest.raises(InvalidArgument, match="bird: expected a folder named after a class"):
        find_samples(tmp_path, "top-k")
    (tmp_path / "bird").rename(tmp_path / "3")
    (tmp_path / "3" / "notes.doc").touch()
    with pytest.raises(InvalidArgument, match=r"notes\.doc: expected a picture, a sound, or an array"):
        find_samples(tmp_path, "top-k")


async def test_picture_is_scaled_and_its_pixels_mapped(tmp_path: Path) -> None:
    pytest.importorskip("av", reason="PyAV is not installed")
    path = tmp_path / "red.ppm"
    write_ppm(path, np.full((8, 16, 3), (255, 0, 128)))
    seen = await read_sample(Sample(path, 0), operand(1, 4, 6, 3), (-1.0, 1.0))
    assert seen.shape == (1, 4, 6, 3)
    assert seen.dtype == np.float32
    np.testing.assert_allclose(seen[0, 2, 3], (1.0, -1.0, 0.0), atol=0.03)
    grey = await read_sample(Sample(path, 0), operand(1, 4, 6, 1), PIXELS)
    np.testing.assert_allclose(grey, 0.5, atol=0.01)
    stored = await read_sample(
        Sample(path, 0),
        operand(1, 4, 6, 3, kind=OperandType.TENSOR_QUANT8_ASYMM_SIGNED, scale=1 / 255, zero=-128),
        PIXELS,
    )
    assert stored.dtype == np.int8
    np.testing.assert_allclose(stored[0, 2, 3], (127, -128, 0), atol=3)


@pytest.mark.parametrize("seconds", [0.5, 1.0, 1.7])
async def test_sound_is_cut_or_filled_with_silence(tmp_path: Path, seconds: float) -> None:
    heard = np.random.default_rng(1).uniform(-0.5, 0.5, round(16_000 * seconds))
    path = tmp_path / "noise.wav"
    write_wav(path, heard)
    seen = await read_sample(Sample(path, 0), operand(1, 49, 40, 1), PIXELS)
    samples = 512 + 48 * 320
    wanted = np.zeros(samples, dtype=np.float32)
    wanted[: min(samples, heard.size)] = heard[:samples]
    np.testing.assert_allclose(seen[0, :, :, 0], LogMel()(wanted), atol=0.02)


async def test_array_must_fit_the_input(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    np.save(path, np.arange(6, dtype=np.float16))
    seen = await read_sample(Sample(path, 0), operand(1, 2, 3), PIXELS)
    assert seen.dtype == np.float32
    np.testing.assert_array_equal(seen, np.arange(6).reshape(1, 2, 3))
    with pytest.raises(InvalidArgument, match=r"a\.npy: expected an array of shape \[1, 2, 4\], got \[6\]"):
        await read_sample(Sample(path, 0), operand(1, 2, 4), PIXELS)
    steps = await read_sample(Sample(path, expected=path), operand(1, 2), PIXELS)
    assert steps.shape == (3, 1, 2)
    with pytest.raises(InvalidArgument, match="a whole number of steps"):
        await read_sample(Sample(path, expected=path), operand(1, 4), PIXELS)


@pytest.mark.parametrize("content", [b"", b"not an array", b"\x93NUMPY\x01\x00"])
async def test_damaged_array_is_named_and_no_code_of_it_runs(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.npy"
    path.write_bytes(content)
    with pytest.raises(InvalidArgument, match=r"bad\.npy: expected an array"):
        await read_sample(Sample(path, 0), operand(1), PIXELS)
    np.save(path, np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(InvalidArgument, match=r"bad\.npy: expected an array"):
        await read_sample(Sample(path, 0), operand(1), PIXELS)


async def test_media_that_do_not_fit_the_input_are_named(tmp_path: Path) -> None:
    for name, match in (
        ("a.png", "a picture needs an input of shape"),
        ("a.wav", "a sound needs an input of log-mel"),
    ):
        (tmp_path / name).touch()
        with pytest.raises(InvalidArgument, match=match):
            await read_sample(Sample(tmp_path / name, 0), operand(1, 7), PIXELS)


def identity(count: int) -> Model:
    """A model whose output is its input: what the data say is what the evaluator sees."""
    graph = GraphBuilder()
    x = graph.input(OperandType.TENSOR_FLOAT32, (1, count))
    zero = graph.constant(np.zeros((1, count), dtype=np.float32))
    return graph.build([graph.result(OperationType.ADD, [x, zero, 0], x)])


async def test_any_file_that_does_not_fit_is_named_before_the_work(tmp_path: Path) -> None:
    folder = tmp_path / "6"
    folder.mkdir()
    for index in range(3):
        np.save(folder / f"{index}.npy", np.zeros(7, np.float32))
    known = KnownData(str(tmp_path))
    await check_known(identity(7), known)
    with pytest.raises(InvalidArgument, match="6: expected a class from 0 to 4, got 6"):
        await check_known(identity(5), known)
    last = folder / "2.npy"
    np.save(last, np.zeros(8, np.float32))
    with pytest.raises(InvalidArgument, match=r"2\.npy: expected an array of shape \[1, 7\], got \[8\]"):
        await check_known(identity(7), known)
    np.save(last, np.zeros(7, np.complex64))
    with pytest.raises(InvalidArgument, match=r"2\.npy: expected an array of numbers, got complex64"):
        await check_known(identity(7), known)
    np.save(last, np.zeros(7, np.float32))
    last.write_bytes(last.read_bytes()[:-4])
    with pytest.raises(InvalidArgument, match=r"2\.npy: expected an array: "):
        await check_known(identity(7), known)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "expected '.*b.png' to hold video, got no media file"),
        (b"no picture", "b.png: expected a picture"),
    ],
)
async def test_damaged_picture_is_named_before_the_work(tmp_path: Path, content: bytes, reason: str) -> None:
    pytest.importorskip("av", reason="PyAV is not installed")
    graph = GraphBuilder()
    x = graph.input(OperandType.TENSOR_FLOAT32, (1, 4, 4, 3))
    model = graph.build([graph.result(OperationType.RELU, [x], x)])
    (tmp_path / "0").mkdir()
    write_ppm(tmp_path / "0" / "a.ppm", np.zeros((4, 4, 3)))
    await check_known(model, KnownData(str(tmp_path)))
    (tmp_path / "0" / "b.png").write_bytes(content)
    with pytest.raises(InvalidArgument, match=reason):
        await check_known(model, KnownData(str(tmp_path)))


@pytest.mark.parametrize(
    ("evaluator", "right", "reason"),
    [
        ("mel-cepstral", (3, 48), r"expected 49 numbers for each of 3 steps, got \[3, 48\]"),
        ("mel-cepstral", (0,), "expected at least one number"),
        ("phone-error", (0,), "expected at least one number"),
    ],
)
async def test_right_outputs_that_do_not_fit_are_named_before_the_work(
    tmp_path: Path, evaluator: Evaluator, right: tuple[int, ...], reason: str
) -> None:
    np.save(tmp_path / "a.npy", np.zeros((3, 49), np.float32))
    wanted = tmp_path / "a.expected.npy"
    np.save(wanted, np.zeros((3, 49), np.float32))
    await check_known(identity(49), KnownData(str(tmp_path), evaluator))
    np.save(wanted, np.zeros(right, np.float32))
    with pytest.raises(InvalidArgument, match=rf"a\.expected\.npy: {reason}"):
        await check_known(identity(49), KnownData(str(tmp_path), evaluator))


async def judged(model: Model, known: KnownData) -> Evaluation:
    async with aionn.open(drivers=["reference"], isolation="in_process") as runtime:
        prepared = await runtime.device("reference").hal.prepare_model(model)
        try:
            return await evaluate(prepared, model, known)
        finally:
            await prepared.aclose()


async def test_speech_goes_the_whole_way(tmp_path: Path) -> None:
    generator = np.random.default_rng(5)
    for name, error in (("good", 0.0), ("bad", 5.0)):
        frames = generator.normal(size=(3, 4 * 49)).astype(np.float32)
        np.save(tmp_path / f"{name}.npy", frames)
        wanted = frames.reshape(-1, 49).copy()
        wanted[:, 1:40] += error
        np.save(tmp_path / f"{name}.expected.npy", wanted)
    found = await judged(identity(196), KnownData(str(tmp_path), "mel-cepstral"))
    assert found.samples == 2
    assert found.values["mel_cepstral_distortion"] == pytest.approx(5.0, rel=1e-5)
    assert len(found.failures) == 1
    assert found.failures[0].startswith("sequence 0:")  # bad.npy comes before good.npy


async def test_phones_go_the_whole_way(tmp_path: Path) -> None:
    right = np.arange(40) % 7
    scores = np.eye(7, dtype=np.float32)[right]
    scores[:2] = np.roll(scores[:2], 3, axis=1)
    np.save(tmp_path / "a.npy", scores)
    np.save(tmp_path / "a.expected.npy", right)
    found = await judged(identity(7), KnownData(str(tmp_path), "phone-error"))
    assert found.values == {"phone_error_rate": 2 / 40}
    assert found.failures == ()


@pytest.mark.thorough
async def test_pictures_of_the_test_set_are_recognised(shared: Path, tmp_path: Path) -> None:
    """As files through the whole way: decoding, scaling, quantisation, device, evaluator."""
    pytest.importorskip("av", reason="PyAV is not installed")
    with np.load(shared / "models" / "shapes_test.npz") as test:
        pictures, labels = test["x"][:40], test["y"][:40]
    for index, (picture, label) in enumerate(zip(pictures, labels, strict=True)):
        folder = tmp_path / str(int(label))
        folder.mkdir(exist_ok=True)
        write_ppm(folder / f"{index:03}.ppm", picture)
    model = load_tflite(shared / "models" / "shapes_int8.tflite").model
    found = await judged(model, KnownData(str(tmp_path), expected_top1=0.994))
    assert found.samples == 40
    assert found.values["top1"] >= 0.95
    assert found.values["top5"] == 1.0
    assert found.failures == ()


def test_settings_that_judge_nothing_are_refused(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "a.npy").touch()
    good = KnownData(str(tmp_path))
    good.check()
    for change, match in (
        ({"evaluator": "taste"}, "bench, evaluator: expected one of top-k"),
        ({"expected_top1": 99.0}, "expected a share from 0 to 1, got 99"),
        ({"pixels": (1.0, 1.0)}, "expected two different numbers"),
        ({"pixels": (0.0, float("inf"))}, "expected two different numbers"),
        ({"folder": "/nowhere"}, "expected a folder"),
    ):
        with pytest.raises(InvalidArgument, match=match):
            msgspec.structs.replace(good, **change).check()
