"""Network sources are decoded by PyAV."""

import pytest

pytest.importorskip("av", reason="PyAV, the extra `media`, is not installed")
