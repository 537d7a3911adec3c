"""Tables in Markdown from the rows of ``gpu.py``."""

from __future__ import annotations

from gpu_cases import GOALS, PUBLISHED
from gpu_rows import Row, key_of

NOT_MEASURED = "not measured"


def latest(rows: list[Row]) -> list[Row]:
    """Return the last row of each measurement."""
    return list({key_of(row): row for row in rows if row["kind"] not in _EVENTS}.values())


_EVENTS = ("start", "done", "timeout", "crash")
# First words of the groups that check results
_CHECKS = ("check", "hybrid", "delta", "block_sparse", "varlen", "sanitizer", "accuracy")


def failures(rows: list[Row]) -> list[str]:
    """Return wrong results, sanitizer errors, and the checks that crashed or did not finish."""
    found = []
    for row in latest(rows):
        name = f"{row['group']}, {row.get('workload', '')}".removesuffix(", ")
        found += [f"{name}: {text}" for text in row.get("wrong", [])]
        if row.get("sanitizer_errors"):
            found.append(f"{name}: {row['sanitizer_errors']} errors")
        if "error" in row and row["kind"] in ("check", "accuracy", "sanitizer"):
            found.append(f"{name}: {row['error']}")
    done = {row["group"] for row in rows if row["kind"] == "done"}
    late = dict.fromkeys(row["group"] for row in rows if row["kind"] == "timeout")
    ended = {row["group"]: row["reason"] for row in rows if row["kind"] == "crash"}
    events = {group: f"the process ended ({reason})" for group, reason in ended.items()}
    events |= {group: "did not finish in time" for group in late if group not in done | set(ended)}
    found += [f"{name}: {text}" for name, text in events.items() if name.split()[0] in _CHECKS]
    return found


def _table(columns: list[str], rows: list[list[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _number(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}g}"


def goals(rows: list[Row]) -> str:
    """Return the table of goals with their measured values."""
    timed = [row for row in latest(rows) if row["kind"] == "time"]
    lines = []
    for goal in GOALS:
        value = goal.measured(timed)
        unit = "" if goal.metric else "x"
        measured = NOT_MEASURED if value is None else f"{value:.2f}{unit}"
        lines.append([goal.name, f"{goal.comparison} {goal.target}{unit}", measured])
    return _table(["work", "goal", "measured"], lines)


def times(rows: list[Row]) -> str:
    """Return the table of times, memory and the fraction of copy bandwidth of each call."""
    lines = []
    for row in latest(rows):
        if row["kind"] not in ("time", "configs"):
            continue
        remarks = (row.get(name) for name in ("unavailable", "error", "graph_refused", "remark"))
        remark = "; ".join(filter(None, remarks))
        peak, share = row.get("peak_bytes"), row.get("copy_bandwidth_fraction")
        lines.append(
            [
                row["workload"],
                row["implementation"],
                _number(row.get("graph_ms")),
                _number(row.get("eager_ms")),
                "" if peak is None else f"{peak / 2**20:.0f}",
                "" if share is None else f"{share:.0%}",
                remark[:80],
            ]
        )
    for workload, published in PUBLISHED.items():
        if any(row[0] == workload for row in lines):
            for name, ms in published.items():
                lines.append([workload, f"{name} (H100)", "", _number(ms), "", "", ""])
    columns = ["work", "implementation", "graph ms", "eager ms", "peak MiB", "of copy", "remark"]
    return _table(columns, sorted(lines, key=lambda line: line[0]))


def checks(rows: list[Row]) -> str:
    """Return the table of passed, failed and unavailable measurements per group."""
    counts: dict[str, list[int]] = {}
    remarks: dict[str, str] = {}
    for row in latest(rows):
        if row["kind"] not in ("check", "sanitizer", "accuracy"):
            continue
        count = counts.setdefault(row["group"], [0, 0, 0])
        wrong = row.get("wrong") or row.get("sanitizer_errors") or row.get("error")
        count[2 if "unavailable" in row else 1 if wrong else 0] += 1
        if wrong or "unavailable" in row:
            remarks[row["group"]] = str(row.get("unavailable") or wrong)[:100]
    for row in rows:
        if row["kind"] in ("crash", "timeout"):
            remarks[row["group"]] = f"{row['kind']} {row.get('reason', '')}".strip()[:100]
            counts.setdefault(row["group"], [0, 0, 0])
    lines = [[name, *map(str, count), remarks.get(name, "")] for name, count in counts.items()]
    return _table(["group", "passed", "failed", "unavailable", "remark"], lines)


def other(rows: list[Row]) -> str:
    """Return the rows about the machine, profiles, models and tools as a list."""
    lines = []
    for row in latest(rows):
        if row["kind"] in ("machine", "copy", "profile", "llama", "tool", "again"):
            hidden = ("group", "kind", "output", "where")
            shown = ", ".join(f"{k} {v}" for k, v in row.items() if k not in hidden)
            lines.append(f"- {row['kind']}: {shown}\n")
    return "".join(lines)


def summary(rows: list[Row]) -> str:
    """Return all tables."""
    parts = (goals(rows), times(rows), checks(rows), other(rows))
    return "\n".join(parts)
