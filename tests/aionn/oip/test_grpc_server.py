"""The gRPC server, by claims that a process of its own checks (``grpc_claims.py``)."""

from __future__ import annotations

import pytest

from tests.aionn.oip.claims import claims_of, outcomes_of

RUN_S_MAX = 110
"""Limit of all claims together."""


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """The traceback of each claim that failed, by name; empty for the others."""
    pytest.importorskip("grpc", reason="grpcio is not installed")
    return outcomes_of("grpc_claims", limit_s=RUN_S_MAX)


@pytest.mark.parametrize("claim", claims_of("grpc_claims"))
def test_claim_about_the_server_holds(outcomes: dict[str, str], claim: str) -> None:
    assert outcomes[claim] == ""
