"""The colours of pages: contrast by WCAG, in both settings, and devices that keep theirs."""

from __future__ import annotations

import itertools

import pytest

from aionn.reports.colours import (
    DEVICE_COLOURS,
    OUTCOME_ROLES,
    PAPERS,
    SHAPES,
    TEXTS,
    Colour,
    contrast,
    device_roles,
    variables,
)

TEXT_MIN, SHAPE_MIN = 4.5, 3.0  # WCAG 2.2, 1.4.3 and 1.4.11, level AA.

SCHEMES = Colour._fields


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [("#000000", "#ffffff", 21.0), ("#123456", "#123456", 1.0), ("#767676", "#ffffff", 4.54), ("#ff0000", "#ffffff", 4.0)],
)  # fmt: skip
def test_contrast_is_that_of_wcag(first: str, second: str, expected: float) -> None:
    assert contrast(first, second) == contrast(second, first) == pytest.approx(expected, abs=0.005)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_text_can_be_read_on_every_paper(scheme: str) -> None:
    for (text, ink), (paper, behind) in itertools.product(TEXTS.items(), PAPERS.items()):
        assert contrast(getattr(ink, scheme), getattr(behind, scheme)) >= TEXT_MIN, (text, paper)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_shape_is_seen_on_every_paper_and_holds_text(scheme: str) -> None:
    paper = getattr(PAPERS["paper"], scheme)
    for role, colour in SHAPES.items():
        for behind in PAPERS.values():
            assert contrast(getattr(colour, scheme), getattr(behind, scheme)) >= SHAPE_MIN, role
        # Text in a box has the colour of the paper.
        assert contrast(getattr(colour, scheme), paper) >= TEXT_MIN, role


@pytest.mark.parametrize("scheme", SCHEMES)
def test_colours_of_one_kind_differ(scheme: str) -> None:
    kinds = (
        [f"device-{i}" for i in range(DEVICE_COLOURS)],
        ["high", "medium", "low"],
        list(OUTCOME_ROLES.values()),
    )
    for roles in kinds:
        colours = [getattr(SHAPES[role], scheme) for role in roles]
        for first, second in itertools.combinations(colours, 2):
            distance = sum((int(first[i : i + 2], 16) - int(second[i : i + 2], 16)) ** 2 for i in (1, 3, 5))
            assert distance >= 45**2, (first, second)


def test_device_has_its_colour_on_every_page() -> None:
    alone = {name: device_roles([name])[name] for name in ("reference", "litert-cpu", "phone-npu")}
    assert device_roles(["reference", "litert-cpu", "reference"]) == {
        name: alone[name] for name in ("reference", "litert-cpu")
    }
    assert list(device_roles(["reference", "litert-cpu"])) == ["reference", "litert-cpu"]


def test_devices_of_one_page_differ_as_long_as_there_are_colours() -> None:
    names = [f"device {number}" for number in range(DEVICE_COLOURS + 1)]
    roles = device_roles(names)
    assert len(set(device_roles(names[:-1]).values())) == DEVICE_COLOURS
    assert len(set(roles.values())) == DEVICE_COLOURS
    assert device_roles(reversed(names)) == roles


def test_sheet_gives_every_role_a_colour_in_both_settings() -> None:
    light, dark = variables().split("@media (prefers-color-scheme:dark)")
    for role, colour in {**PAPERS, **TEXTS, **SHAPES}.items():
        assert f"--{role}:{colour.light};" in light
        assert f"--{role}:{colour.dark};" in dark
