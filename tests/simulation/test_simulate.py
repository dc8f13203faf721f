"""The command: figures, the page, and mistakes."""

import json
import re
from html.parser import HTMLParser

import pytest

from aionn.cli.main import main
from aionn.simulation.baselines import POLICIES


class Page(HTMLParser):
    """Counts tags, and fails on what would need a network."""

    def __init__(self):
        super().__init__()
        self.tags = {}
        self.drawings = 0
        self.open = []

    def handle_starttag(self, tag, attrs):
        self.tags[tag] = self.tags.get(tag, 0) + 1
        self.drawings += ("role", "img") in attrs
        assert tag not in ("script", "link", "img", "iframe")
        assert not any(name in ("src", "href") for name, _ in attrs)
        if tag not in ("meta", "rect", "path", "polyline"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in ("rect", "path", "polyline"):
            assert self.open.pop() == tag


def run(*arguments):
    with pytest.raises(SystemExit) as caught:
        main(["simulate", *map(str, arguments)])
    return caught.value.code


def test_json_counts_every_request(repository, capsys):
    workload = repository / "benchmarks" / "workloads" / "chains.toml"
    assert run(workload, "--json", "--seed", 3) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["policy"] == "plan" and report["seed"] == 3
    for of_class in report["classes"]:
        told = sum(of_class[kind] for kind in ("on_time", "late", "aborted", "refused", "failed"))
        assert told == of_class["requests"] > 0
    assert run(workload, "--json", "--seed", 3) == 0
    assert json.loads(capsys.readouterr().out)["digest"] == report["digest"]
    assert run(workload, "--json", "--seed", 4) == 0
    assert json.loads(capsys.readouterr().out)["digest"] != report["digest"]


def test_page_stands_alone(repository, tmp_path, capsys):
    workload = repository / "benchmarks" / "workloads" / "mobile.toml"
    assert run(workload, "--html", tmp_path / "page.html", "--policy", "fifo") == 0
    text = (tmp_path / "page.html").read_text()
    page = Page()
    page.feed(text)
    assert page.open == [] and page.drawings == 3
    assert page.tags["polyline"] == 3 and page.tags["rect"] > 300
    assert "http" not in text and re.search(r'high</td><td class="n" data-head="requests">\d+</td>', text)
    assert "phone-npu" in capsys.readouterr().out


@pytest.mark.thorough
def test_bound_and_checks_are_told(repository, capsys):
    pytest.importorskip("scipy", reason="the bound needs scipy")
    workload = repository / "benchmarks" / "workloads" / "mobile.toml"
    assert run(workload, "--json", "--bound", "--check") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["breaches"] == []
    for of_class in report["classes"]:
        assert of_class["on_time"] <= report["bound"][of_class["priority"]]


def test_mistakes_are_told_in_a_sentence(repository, tmp_path, capsys):
    workload = repository / "benchmarks" / "workloads" / "mobile.toml"
    assert run(workload, "--policy", "magic") == 2
    assert '"magic" for --policy. Choose from: "plan", "fifo"' in capsys.readouterr().err
    (tmp_path / "w.toml").write_text(workload.read_text().replace('"high"', '"highest"', 1))
    assert run(tmp_path / "w.toml") == 2
    assert "w.toml, line 8, stream[0].priority: expected one of low, medium, high" in capsys.readouterr().err
    assert run(workload, "--html", tmp_path / "no" / "page.html") == 2
    assert "expected a file that can be written" in capsys.readouterr().err


def test_trace_is_looked_for_where_told(repository, shared, tmp_path, capsys):
    workload = repository / "benchmarks" / "workloads" / "trace-code.toml"
    assert run(workload, "--folder", tmp_path) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "stream code, trace:" in told and "No such file" in told
    assert run(workload, "--json", "--folder", shared / "traces") == 0
    assert json.loads(capsys.readouterr().out)["workload"] == "trace-code"


@pytest.mark.sampled(9)
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_runs_and_keeps_the_rules(repository, capsys, policy):
    workload = repository / "benchmarks" / "workloads" / "bursty.toml"
    assert run(workload, "--policy", policy, "--json", "--check") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["policy"] == policy and report["breaches"] == []
