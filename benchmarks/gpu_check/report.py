"""The report: a table for people, JSON lines for programs."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.check import Figure
from benchmarks.gpu_check.runner import Result

HEADER = ("check", "passed", "figure", "bound", "what")


def machine_lines(machine: dict[str, Any]) -> list[str]:
    """What was found on the machine, and what is missing."""
    found = {name: version for name, version in machine["packages"].items() if version is not None}
    absent = [name for name, version in machine["packages"].items() if version is None]
    where = "; ".join(machine.get("gpus", [])) or machine["device"]
    more = "".join(f", {name} {machine[name]}" for name in ("cuda", "nccl") if machine.get(name))
    return [
        f"Python {machine['python']}{more}, {machine['cores']} cores, C compiler {machine['compiler'] or 'none'}",
        where,
        "found: " + ", ".join(f"{name} {version}" for name, version in found.items()),
        "missing: " + (", ".join(absent) or "nothing"),
    ]


def number(value: float | str | None) -> str:
    """Three digits of a number."""
    if value is None:
        return ""
    return value if isinstance(value, str) else f"{value:.3g}" if abs(value) < 1e5 else f"{value:,.0f}"


def rows(result: Result) -> list[tuple[str, str, str, str, str]]:
    """Lines of the table for one check: its figures, and why it was skipped or failed."""
    name, made = result.check.name, [_row(result.check.name, figure) for figure in result.figures]
    if result.skipped is not None:
        made.append((name, "skipped", "", "", result.skipped))
    if result.error is not None:
        made.append((name, "no figure" if result.check.measures else "NO", "", "", result.error))
    elif not made:
        made.append((name, "NO", "", "", "it gave no figure"))
    return made


def _row(name: str, figure: Figure) -> tuple[str, str, str, str, str]:
    verdict = {True: "yes", False: "NO", None: ""}[figure.passed]
    value = f"{number(figure.value)} {figure.unit}".strip()
    return name, verdict, value, number(figure.bound), figure.case


def table(results: Sequence[Result]) -> str:
    """All results as a Markdown table."""
    lines = [HEADER, *(row for result in results for row in rows(result))]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADER))]
    text = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    ]
    text.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(text)


def summary(results: Sequence[Result], seconds: float) -> str:
    """One line: how many passed, failed and were skipped."""
    checks = [result for result in results if not result.check.measures]
    failed = [result.check.name for result in checks if result.passed is False]
    broken = [result.check.name for result in results if result.check.measures and result.error is not None]
    passed, skipped = sum(result.passed is True for result in checks), sum(r.skipped is not None for r in results)
    text = f"{passed} checks passed, {len(failed)} failed, {skipped} skipped, in {seconds:.0f} s"
    text += f"; failed: {', '.join(failed)}" if failed else ""
    return text + (f"; measurements that broke off: {', '.join(broken)}" if broken else "")


def write(folder: Path, machine: dict[str, Any], results: Sequence[Result], seconds: float) -> None:
    """Write ``report.md`` and ``report.jsonl``."""
    head = "\n".join(machine_lines(machine)) if machine else "no process came up"
    parts = ["# gpu-check", head, table(results), summary(results, seconds)]
    (folder / "report.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    lines: list[dict[str, Any]] = [{"machine": machine, "seconds": round(seconds, 1)}]
    for result in results:
        known = {"check": result.check.name, "passed": result.passed, "seconds": result.seconds}
        reasons = {"skipped": result.skipped, "error": result.error}
        figures = [asdict(figure) | {"passed": figure.passed} for figure in result.figures]
        lines.append(known | {key: text for key, text in reasons.items() if text is not None} | {"figures": figures})
    (folder / "report.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
