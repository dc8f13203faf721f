"""A report of the driver suite as others read it: JUnit's XML for build servers, one HTML file for people.

Owns both forms. Neither refers to anything outside of itself.

Source: the schema of JUnit's ant task, as build servers read it.
"""

from __future__ import annotations

import html
import xml.etree.ElementTree as ElementTree

from aionn.conformance.suite import Counts
from aionn.conformance.vts.run import VtsOutcome, VtsReport

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


_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #1d2329; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid #e2e6ea; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; } code { overflow-wrap: anywhere; }
.passed { color: #19703a; } .failed { color: #b3261e; font-weight: 600; }
.skipped, .expected_failure { color: #6b7280; } summary { cursor: pointer; font-weight: 600; padding: .3rem 0; }
"""


def html_report(report: VtsReport) -> str:
    """The report as one self-contained HTML file."""
    title = html.escape(f"Driver suite: {report.driver}")
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
        f"<title>{title}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{title}</h1>",
        f"<p>{report.passed} passed, <span class='{'failed' if report.failed else 'passed'}'>{report.failed} failed</span>, "
        f"{report.skipped} skipped, {report.expected_failures} failed as expected, in {report.seconds:.1f} s.</p>",
        *_failures(report),
        "<h2>By group</h2><table><tr><th>group<th class=n>passed<th class=n>failed<th class=n>skipped"
        "<th class=n>expected failures</tr>",
        *(_counts_row(group, counts) for group, counts in report.by_group.items()),
        "</table><h2>Cases</h2>",
        *(_group(report, group) for group in report.by_group),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _failures(report: VtsReport) -> list[str]:
    if not report.failures:
        return []
    rows = (
        f"<tr><td><code>{html.escape(f.case)}</code><td>{html.escape(f.where)}<td>{html.escape(f.expected)}"
        f"<td>{html.escape(f.got)}</tr>"
        for f in report.failures
    )
    return ["<h2>Failures</h2><table><tr><th>case<th>where<th>expected<th>got</tr>", *rows, "</table>"]


def _counts_row(group: str, counts: Counts) -> str:
    cells = (counts.passed, counts.failed, counts.skipped, counts.expected_failures)
    return f"<tr><td>{html.escape(group)}" + "".join(f"<td class=n>{cell}" for cell in cells) + "</tr>"


def _group(report: VtsReport, group: str) -> str:
    outcomes = [outcome for outcome in report.outcomes if outcome.case.startswith(f"{group}/")]
    is_open = " open" if report.by_group[group].failed else ""
    rows = "".join(
        f"<tr><td><code>{html.escape(o.case.partition('/')[2])}</code>"
        f"<td class='{o.verdict}'>{o.verdict.replace('_', ' ')}"
        f"<td>{html.escape(str(o.failure) if o.failure is not None else o.reason)}<td class=n>{o.seconds:.3f} s</tr>"
        for o in outcomes
    )
    return f"<details{is_open}><summary>{html.escape(group)} ({len(outcomes)})</summary><table>{rows}</table></details>"
