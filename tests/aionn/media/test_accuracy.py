"""The sources and the front end together, judged by trained models: right answers need right pixels and right features."""

import json

import numpy as np
import pytest

from aionn.media import audio_file, log_mel, video_file

interpreter = pytest.importorskip("ai_edge_litert.interpreter", reason="ai-edge-litert is not installed")


class Model:
    """A model file, run by LiteRT."""

    def __init__(self, path):
        self.engine = interpreter.Interpreter(str(path), num_threads=1)
        self.engine.allocate_tensors()
        (self.input,), (self.output,) = self.engine.get_input_details(), self.engine.get_output_details()

    def probabilities(self, values):
        kind = self.input["dtype"]
        if kind != np.float32:
            scale, zero_point = self.input["quantization"]
            limits = np.iinfo(kind)
            values = np.clip(np.round(values / scale) + zero_point, limits.min, limits.max)
        self.engine.set_tensor(self.input["index"], values.astype(kind).reshape(self.input["shape"]))
        self.engine.invoke()
        answer = self.engine.get_tensor(self.output["index"])[0]
        if kind != np.float32:
            scale, zero_point = self.output["quantization"]
            answer = (answer.astype(np.float32) - zero_point) * scale
        return answer


async def items_of(source):
    async with source as opened:
        return [item async for item in opened]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["float", "int8", pytest.param("uint8", marks=pytest.mark.long)])
@pytest.mark.thorough
async def test_shapes_are_named_in_all_frames_but_two(data, kind):
    pytest.importorskip("av", reason="PyAV, the extra `media`, is not installed")
    truth = json.loads((data / "shapes.json").read_text())
    model = Model(data / f"shapes_{kind}.tflite")
    frames = await items_of(video_file(data / "shapes.mp4", size=(96, 96), pace=False))
    assert len(frames) == len(truth["labels"]) == 600
    right = sum(
        truth["classes"][model.probabilities(frame.data / 255).argmax()] == label
        for frame, label in zip(frames, truth["labels"])
    )
    assert right >= 598


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["float", "int8", pytest.param("uint8", marks=pytest.mark.long)])
async def test_all_thirty_words_are_heard(data, kind):
    truth = json.loads((data / "digits.json").read_text())
    model = Model(data / f"digits_{kind}.tflite")
    windows = await items_of(audio_file(data / "digits.wav", pace=False))
    centres_s = np.array([window.start_s + 0.5 for window in windows])
    digits = np.stack([model.probabilities(log_mel(window.samples)) for window in windows])[:, 1:]
    heard = []
    for word in truth["words"]:
        near = digits[np.abs(centres_s - (word["start_s"] + word["end_s"]) / 2) <= 0.2]
        best = near[near.max(1).argmax()]
        heard.append(truth["classes"][1 + best.argmax()] if best.max() > 0.5 else None)
    assert heard == [word["word"] for word in truth["words"]]
    assert len(heard) == 30
