"""Log-mel energies against a slow loop over frames and bands."""

import math
import time

import numpy as np
import pytest

from aionn.errors import InvalidArgument
from aionn.media import LogMel, log_mel
from aionn.media.features import filter_bank


def slow_log_mel(samples):
    """The definition, in float64, one frame, bin and band at a time."""

    def mel(hertz):
        return 2595 * math.log10(1 + hertz / 700)

    corners = [mel(60) + (mel(7_600) - mel(60)) * k / 41 for k in range(42)]
    corners = [700 * (10 ** (corner / 2595) - 1) for corner in corners]
    hann = [0.5 - 0.5 * math.cos(2 * math.pi * n / 511) for n in range(512)]
    features = np.empty((49, 40))
    for frame in range(49):
        power = np.abs(np.fft.rfft(samples[frame * 320 : frame * 320 + 512].astype(np.float64) * hann)) ** 2
        for band, (left, peak, right) in enumerate(zip(corners, corners[1:], corners[2:])):
            energy = 0.0
            for number, value in enumerate(power):
                hertz = number * 16_000 / 512
                if left < hertz <= peak:
                    energy += value * (hertz - left) / (peak - left)
                elif peak < hertz < right:
                    energy += value * (right - hertz) / (right - peak)
            features[frame, band] = math.log(max(energy, 1e-6))
    return features


@pytest.mark.parametrize("level", [0.9, 1e-3])
def test_features_follow_the_definition(level):
    samples = (level * np.random.default_rng(7).uniform(-1, 1, 16_000)).astype(np.float32)
    features = log_mel(samples)
    assert features.shape == (49, 40)
    assert features.dtype == np.float32
    np.testing.assert_allclose(features, slow_log_mel(samples), atol=2e-3)


def test_silence_is_the_floor():
    features = log_mel(np.zeros(16_000, np.float32))
    np.testing.assert_allclose(features, math.log(1e-6), rtol=1e-6)


def test_a_tone_is_in_the_band_around_it():
    for hertz in (200.0, 1_000.0, 5_000.0):
        samples = np.sin(2 * np.pi * hertz * np.arange(16_000) / 16_000).astype(np.float32)
        band = int(log_mel(samples)[20].argmax())
        bank = filter_bank(np.array([hertz]), 40, 60.0, 7_600.0)[:, 0]
        assert bank[band] == bank.max() > 0.4


def test_triangles_have_height_one_and_meet_their_neighbours():
    bins_hz = np.arange(0, 8_000, 0.5)
    bank = filter_bank(bins_hz, 40, 60.0, 7_600.0)
    assert bank.shape == (40, bins_hz.size)
    np.testing.assert_allclose(bank.max(1), 1.0, atol=0.02)
    inside = (bins_hz > bins_hz[bank[0].argmax()]) & (bins_hz < bins_hz[bank[39].argmax()])
    np.testing.assert_allclose(bank[:, inside].sum(0), 1.0, atol=1e-9)
    assert bank[:, (bins_hz <= 60) | (bins_hz >= 7_600)].max() < 1e-12


def test_input_is_not_written():
    samples = np.ones(16_000, np.float32)
    samples.setflags(write=False)
    log_mel(samples)


def test_other_front_ends_can_be_built():
    front_end = LogMel(sample_rate_hz=8_000, frame_samples=256, hop_samples=80, bands=20, high_hz=4_000)
    assert front_end(np.zeros(8_000, np.float32)).shape == ((8_000 - 256) // 80 + 1, 20)


@pytest.mark.parametrize("shape", [(15_999,), (16_001,), (1, 16_000), (0,)])
def test_other_shapes_are_refused(shape):
    with pytest.raises(InvalidArgument, match=r"log_mel: expected samples of shape \[16000\], got"):
        log_mel(np.zeros(shape, np.float32))


def test_too_few_samples_and_impossible_filters_are_refused():
    with pytest.raises(
        InvalidArgument, match=r"LogMel: expected samples of shape \[n\], n >= 512, got \[511\]"
    ):
        LogMel()(np.zeros(511, np.float32))
    with pytest.raises(InvalidArgument, match="LogMel: high_hz: expected 0 to 8000, got 9000"):
        LogMel(high_hz=9_000)


def test_one_second_takes_less_than_five_milliseconds():
    samples = np.random.default_rng(1).uniform(-1, 1, 16_000).astype(np.float32)
    log_mel(samples)
    best_ns = min(_taken_ns(samples) for _ in range(20))
    # It takes 0.1 to 0.4 ms. The limit leaves room for a loaded machine and still catches a loop in Python.
    assert best_ns < 5_000_000


def _taken_ns(samples):
    started_ns = time.perf_counter_ns()
    log_mel(samples)
    return time.perf_counter_ns() - started_ns
