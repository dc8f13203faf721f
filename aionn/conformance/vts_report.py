"""A report of the driver suite as others read it: JUnit's XML for build servers, one HTML file for people.

Owns both forms; ``aionn.reports`` has the page's style. Neither refers to anything outside of itself.

Source: the schema of JUnit's ant task, as build servers read it.
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

from aionn.conformance.vts.run import VtsOutcome, VtsReport
from aionn.reports.html_page import Html, document, element, marked, table

__all__ = ["html_report", "junit_report"]


def junit_report(report: VtsReport) -> str:
    """The report as JUnit's XML: one suite for each group of cases."""
    root = ElementTree.Element(
        "testsuites",
        name=f"aionn driver suite: {report.driver}",
        tests=str(len(report.outcomes)),
        failures=str(report.failed),
        skipped=str(report.skipped),
        time=f"{report.seconds:.3f}",
    )
    suites: dict[str, ElementTree.Element] = {}
    for outcome in report.outcomes:
        group = outcome.case.partition("/")[0]
        if group not in suites:
            counts = report.by_group[group]
            suites[group] = ElementTree.SubElement(
                root,
                "testsuite",
                name=group,
                tests=str(counts.total),
                failures=str(counts.failed),
                skipped=str(counts.skipped + counts.expected_failures),
                time=f"{sum(o.seconds for o in report.outcomes if o.case.startswith(f'{group}/')):.3f}",
            )
        _junit_case(suites[group], outcome)
    for failure in report.failures:
        if failure.case not in {outcome.case for outcome in report.outcomes}:
            suite = ElementTree.SubElement(root, "testsuite", name=failure.case, tests="1", failures="1")
            case = ElementTree.SubElement(suite, "testcase", classname=failure.case, name=_clean(failure.got))
            ElementTree.SubElement(case, "failure", message=_clean(str(failure)))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _junit_case(suite: ElementTree.Element, outcome: VtsOutcome) -> None:
    group, _, name = outcome.case.partition("/")
    case = ElementTree.SubElement(
        suite, "testcase", classname=group, name=name, time=f"{outcome.seconds:.3f}"
    )
    if outcome.failure is not None:
        ElementTree.SubElement(case, "failure", message=_clean(str(outcome.failure)))
    elif outcome.verdict in ("skipped", "expected_failure"):
        # JUnit knows no expected failures.
        prefix = "failed as expected: " if outcome.verdict == "expected_failure" else ""
        ElementTree.SubElement(case, "skipped", message=_clean(prefix + outcome.reason))


def _clean(text: str) -> str:
    """The text without characters that XML cannot hold."""
    return "".join(c if c in "\t\n" or (c >= " " and c not in "\ufffe\uffff") else "\ufffd" for c in text)


_KINDS = {"passed": "good", "failed": "bad", "skipped": "soft", "expected_failure": "warn"}
"""The colour of each verdict."""


def html_report(report: VtsReport) -> str:
    """The report as one self-contained HTML file."""
    counts = [
        (group, c.passed, c.failed, c.skipped, c.expected_failures) for group, c in report.by_group.items()
    ]
    failures = [(element("code", f.case), f.where, f.expected, f.got) for f in report.failures]
    heads = ("case", "where", "expected", "got")
    return document(
        f"Driver suite: {report.driver}",
        element(
            "p",
            f"{report.passed} passed, ",
            marked(f"{report.failed} failed", "bad" if report.failed else "good"),
            f", {report.skipped} skipped, {report.expected_failures} failed as expected, in {report.seconds:.1f} s.",
        ),
        *((element("h2", "Failures"), table(heads, failures, text=heads[1:])) if failures else ()),
        element("h2", "By group"),
        table(("group", "passed", "failed", "skipped", "expected failures"), counts),
        element("h2", "Cases"),
        *(_group(report, group) for group in report.by_group),
    )


def _group(report: VtsReport, group: str) -> Html:
    outcomes = [outcome for outcome in report.outcomes if outcome.case.startswith(f"{group}/")]
    rows = [
        (
            element("code", o.case.partition("/")[2]),
            marked(o.verdict.replace("_", " "), _KINDS[o.verdict]),
            o.failure if o.failure is not None else o.reason,
            f"{o.seconds:.3f} s",
        )
        for o in outcomes
    ]
    return element(
        "details",
        element("summary", f"{group} ({len(outcomes)})"),
        table(("case", "verdict", "reason", "time"), rows, text=("reason",)),
        open=report.by_group[group].failed > 0,
    )
