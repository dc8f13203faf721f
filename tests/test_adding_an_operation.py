"""docs/drivers/adding-an-operation.md lists every place that an operation appears in."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "drivers" / "adding-an-operation.md"
EVERYWHERE = "MIRROR_PAD"
"""An operation that appears in each place but the last ones, which few operations need."""

RARE = 4
"""Places at the end of the table that ``EVERYWHERE`` does not need."""


def listed_places() -> list[str]:
    return re.findall(r"(?m)^\| `([^`]+)` \|", PAGE.read_text())


def files_with(pattern: str, operation: str) -> list[str]:
    name = re.compile(rf"\b{operation}\b")
    paths = sorted(path for path in ROOT.glob(pattern) if path.is_file())
    return [path.relative_to(ROOT).as_posix() for path in paths if name.search(path.read_text())]


@pytest.mark.parametrize("place", listed_places()[:-RARE])
def test_operation_is_found_in_each_listed_place(place: str) -> None:
    assert files_with(place, EVERYWHERE), f"{PAGE.name} lists {place}, which has no {EVERYWHERE}"


@pytest.mark.parametrize("place", listed_places()[-RARE:])
def test_rare_place_exists(place: str) -> None:
    assert (ROOT / place).is_file()


@pytest.mark.parametrize("operation", [EVERYWHERE, "HARD_SWISH", "BATCH_MATMUL", "RSQRT"])
@pytest.mark.thorough
def test_operation_is_in_no_file_of_the_package_that_is_not_listed(operation: str) -> None:
    listed = {path for place in listed_places() for path in files_with(place, operation)}
    assert set(files_with("aionn/**/*.py", operation)) <= listed


def test_table_has_enough_rows() -> None:
    assert len(listed_places()) > RARE + 10
