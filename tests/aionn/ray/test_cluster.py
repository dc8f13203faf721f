"""The addresses of a cluster's nodes, from a cluster without Ray; and aionn where Ray is missing."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Sequence

import pytest

from aionn.errors import DeviceUnavailable
from aionn.fleet.addresses import NODES_MAX
from aionn.ray import nodes_of_cluster, ray_fleet


class FakeCluster:
    """Actors and their answers; None does not answer."""

    def __init__(self, answers: dict[str, str | Exception | None]) -> None:
        self.answers = answers

    def names(self) -> list[str]:
        return list(self.answers)

    def addresses(self, names: Sequence[str], within_s: float) -> dict[str, str | Exception]:
        assert within_s == 3
        return {name: answer for name in names if (answer := self.answers[name]) is not None}


def test_nodes_are_found_by_the_names_of_their_actors() -> None:
    cluster = FakeCluster(
        {
            "aionn/edge1/npu": "127.0.0.1:1",
            "trainer": "x",
            "aionn/edge2/npu": ValueError("Traceback\nDeviceUnavailable: the driver is missing"),
            "aionn/edge3/npu": None,
        }
    )
    found = nodes_of_cluster(within_s=3, cluster=cluster)
    assert [(node.device, node.address) for node in found] == [
        ("edge1/npu", "127.0.0.1:1"),
        ("edge2/npu", ""),
        ("edge3/npu", ""),
    ]
    assert [node.reason for node in found[1:]] == [
        "DeviceUnavailable: the driver is missing",
        "no answer within 3 s",
    ]


def test_nodes_that_do_not_serve_are_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    cluster = FakeCluster({"aionn/edge1/npu": "127.0.0.1:1", "aionn/edge2/npu": None})
    with caplog.at_level(logging.WARNING):
        assert ray_fleet(within_s=3, cluster=cluster) == ["127.0.0.1:1"]
    assert "edge2/npu is not used: no answer within 3 s" in caplog.text


def test_a_cluster_without_a_node_is_an_error_with_the_reasons() -> None:
    with pytest.raises(DeviceUnavailable, match=r"\(none was started: see start_nodes\)"):
        ray_fleet(within_s=3, cluster=FakeCluster({}))
    with pytest.raises(DeviceUnavailable, match=r"\(edge2/npu: no answer within 3 s\)"):
        ray_fleet(within_s=3, cluster=FakeCluster({"aionn/edge2/npu": None}))


def test_no_more_addresses_are_given_than_a_runtime_takes() -> None:
    cluster = FakeCluster({f"aionn/edge{n}/npu": f"127.0.0.1:{n + 1}" for n in range(70)})
    assert len(ray_fleet(within_s=3, cluster=cluster)) == NODES_MAX


def test_without_ray_a_call_is_one_clear_sentence_and_an_import_is_fine() -> None:
    script = (
        "import sys; sys.modules['ray'] = None\n"
        "import aionn, aionn.ray\n"
        "try: aionn.ray.ray_fleet()\n"
        "except aionn.DeviceUnavailable as e: print(e)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("aionn.ray: Ray cannot be imported"), done.stderr
    assert done.stdout.endswith("pip install 'aionn[ray]' installs it\n") and done.stdout.count("\n") == 1


def test_importing_aionn_and_its_ray_part_imports_no_ray() -> None:
    script = "import sys, aionn, aionn.ray; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=60).returncode == 0
