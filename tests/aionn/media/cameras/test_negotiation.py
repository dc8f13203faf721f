"""The choice of a format, a size and a rate."""

import itertools

import numpy as np
import pytest

from aionn.errors import InvalidArgument
from aionn.media.cameras.negotiation import EDGE_MAX, PREFERENCE, Offer, Wish, checked_wish, choose


def offers(*rows):
    return [
        Offer(name, (w, h), (w, h), rates=rates) for name, w, h, *rates_ in rows for rates in [tuple(rates_)]
    ]


WEBCAM = offers(
    ("MJPG", 1920, 1080, 30.0),
    ("MJPG", 1280, 720, 60.0, 30.0),
    ("MJPG", 640, 480, 30.0),
    ("YUYV", 640, 480, 30.0, 15.0),
    ("YUYV", 320, 240, 30.0),
    ("YUYV", 1280, 720, 10.0),
    ("YUYV", 1920, 1080, 5.0),
)


@pytest.mark.parametrize(
    ("wish", "expected"),
    [
        (Wish(), ("YUYV", (640, 480), 30.0)),
        (Wish((96, 96)), ("YUYV", (320, 240), 30.0)),
        (Wish((1280, 720)), ("MJPG", (1280, 720), 30.0)),
        (Wish((1280, 720), 10.0), ("YUYV", (1280, 720), 10.0)),
        (Wish((1280, 720), 60.0), ("MJPG", (1280, 720), 60.0)),
        (Wish((1280, 720), format="YUYV"), ("YUYV", (1280, 720), 10.0)),
        (Wish((4000, 4000)), ("MJPG", (1920, 1080), 30.0)),
        (Wish(rate=12.0), ("YUYV", (640, 480), 15.0)),
    ],
    ids=str,
)
def test_webcam_is_asked_for_what_serves_best(wish, expected):
    found = choose(WEBCAM, wish, can_decode_jpeg=True)
    assert (found.format, found.size, found.rate) == expected


def test_without_a_decoder_no_compressed_format_is_chosen():
    assert choose(WEBCAM, Wish((1280, 720)), can_decode_jpeg=False).format == "YUYV"
    assert choose(offers(("MJPG", 640, 480)), Wish(), can_decode_jpeg=False) is None


def test_unknown_formats_are_left_out():
    assert choose(offers(("H264", 640, 480), ("", 1, 1)), Wish(), can_decode_jpeg=True) is None
    assert choose([], Wish(), can_decode_jpeg=True) is None


def test_colour_is_preferred_to_grey_and_a_rate_to_colour():
    both = offers(("GREY", 640, 480, 60.0), ("YUYV", 640, 480, 30.0))
    assert choose(both, Wish(), can_decode_jpeg=True).format == "YUYV"
    assert choose(both, Wish(rate=60.0), can_decode_jpeg=True).format == "GREY"


def test_rate_of_29_97_serves_a_wish_of_30():
    assert choose(offers(("YUYV", 640, 480, 29.97, 59.94)), Wish(), can_decode_jpeg=True).rate == 29.97


def test_range_of_sizes_gives_the_smallest_that_covers_the_wish():
    vivid = [Offer("YUYV", (160, 90), (1920, 1080), (16, 10))]
    assert choose(vivid, Wish((224, 224)), can_decode_jpeg=True).size == (224, 230)
    assert choose(vivid, Wish((5000, 100)), can_decode_jpeg=True).size == (1920, 100)
    assert choose(vivid, Wish((1, 1)), can_decode_jpeg=True).size == (160, 90)


def test_choice_is_within_the_offer_whatever_the_camera_offers():
    random = np.random.default_rng(5)
    numbers = [0, 1, 2, 3, 640, 65_535, 2**31, 2**32 - 1]
    for low, high, step in itertools.product(numbers, numbers, numbers):
        offer = Offer(str(random.choice(PREFERENCE)), (low, low), (high, high), (step, step))
        wished = int(random.integers(1, EDGE_MAX))
        found = choose([offer], Wish((wished, 1)), can_decode_jpeg=True)
        if found is not None:
            for edge in found.size:
                assert 1 <= edge <= EDGE_MAX
                assert low <= edge <= max(low, high)


@pytest.mark.parametrize(
    "arguments",
    [
        ((0, 480), None, None),
        ((640, 10**6), None, None),
        (None, 0, None),
        (None, -1, None),
        (None, float("nan"), None),
        (None, 1e9, None),
        (None, None, "H264"),
        (None, None, ""),
    ],
    ids=str,
)
def test_impossible_wish_is_rejected(arguments):
    with pytest.raises(InvalidArgument, match=r"here: (capture_size|rate|pixel_format)"):
        checked_wish(*arguments, "here")
