"""Logs of live batch sizes."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from graphkit.errors import RecordError
from graphkit.records import CaptureRecord, count_of

LARGEST = 4096
"""Largest batch size that a log may contain. Larger numbers are taken for mistakes."""
_COLUMN, _COUNT = "batch_size", "count"
_MOST_STEPS = 1 << 62
_SHOWN = 40


def read_traffic(path: str | Path, mode: str = "") -> dict[int, int]:
    """Read how many steps had each number of live requests.

    A log is one of

    - CSV with a header that has a column ``batch_size``, and ``count`` if a line is several steps;
    - JSON lines: a number, or an object with ``batch_size``, and ``count`` likewise, per line;
    - a record of ``graphkit capture`` or a ``ReplayStats`` as JSON, whose ``live_sizes`` count.

    Idle steps (batch size 0) are left out.

    Args:
        path: File of the log.
        mode: Mode whose counts are read from a record; empty reads the counts of all modes.

    Returns:
        Steps by live size, ascending.

    Raises:
        RecordError: The file cannot be read, or a line is invalid; the message names the line.
    """
    file = Path(path)
    try:
        with file.open(encoding="utf-8-sig", newline="") as text:
            begin = text.read(1 << 12).lstrip()
            text.seek(0)
            if begin.startswith("{") and (found := _from_object(file, mode)) is not None:
                sizes = found
            elif begin[:1] in ("{", "") or begin[:1].isdigit():
                sizes = _from_lines(enumerate(text, 1))
            else:
                sizes = _from_csv(text)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise RecordError(f"cannot read traffic {path}: {reason}.") from error
    except RecordError as error:
        raise RecordError(f"{path}: {error}") from error
    if not sizes:
        raise RecordError(f"{path}: no step has a live request.")
    return dict(sorted(sizes.items()))


def _from_object(file: Path, mode: str) -> Counter[int] | None:
    """Read a file that is one JSON object; return ``None`` for an object per line."""
    try:
        text = file.read_text(encoding="utf-8-sig")
        body = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if _COLUMN in body:
        return None
    if body.get("kind") == CaptureRecord.KIND:
        modes = CaptureRecord.from_json(text).modes
        counts = [found.stats for found in modes if found.stats and mode in ("", found.mode)]
        return _counted((str(size), n) for stats in counts for size, n in stats.live_sizes.items())
    if not isinstance(body.get("live_sizes"), dict):
        raise RecordError("no batch_size and no live_sizes. Give a log of batch sizes.")
    return _counted(body["live_sizes"].items())


def _counted(pairs: Iterable[tuple[str, Any]]) -> Counter[int]:
    sizes: Counter[int] = Counter()
    for size, count in pairs:
        _add(sizes, size, count, "live_sizes")
    return sizes


def _from_lines(lines: Iterable[tuple[int, str]]) -> Counter[int]:
    sizes: Counter[int] = Counter()
    for number, line in lines:
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            raise RecordError(f"line {number} is not JSON: {_short(line)}.") from None
        if isinstance(value, Mapping):
            if _COLUMN not in value:
                raise RecordError(f"line {number} has no {_COLUMN}: {_short(line)}.")
            _add(sizes, value[_COLUMN], value.get(_COUNT, 1), f"line {number}")
        else:
            _add(sizes, value, 1, f"line {number}")
    return sizes


def _from_csv(text: Iterable[str]) -> Counter[int]:
    rows = csv.reader(text)
    header = [name.strip() for name in next(rows)]
    if _COLUMN not in header:
        raise RecordError(f"the header has no column {_COLUMN}: {_short(','.join(header))}.")
    if header.count(_COLUMN) > 1:
        raise RecordError(f"the header has {header.count(_COLUMN)} columns {_COLUMN}.")
    size_at, count_at = header.index(_COLUMN), _index(header, _COUNT)
    sizes: Counter[int] = Counter()
    for row in rows:
        if not row:
            continue
        if len(row) <= max(size_at, count_at):
            raise RecordError(f"line {rows.line_num} is incomplete: {_short(','.join(row))}.")
        if len(row) > len(header):
            what = f"{count_of(len(row), 'value')} for {count_of(len(header), 'column')}"
            raise RecordError(f"line {rows.line_num} has {what}: {_short(','.join(row))}.")
        count = row[count_at] if count_at >= 0 else 1
        _add(sizes, row[size_at], count, f"line {rows.line_num}")
    return sizes


def _index(header: list[str], name: str) -> int:
    return header.index(name) if name in header else -1


def _add(sizes: Counter[int], size: object, count: object, where: str) -> None:
    size, count = _whole(size, _COLUMN, where, LARGEST), _whole(count, _COUNT, where, _MOST_STEPS)
    if size and count:
        sizes[size] += count


def _whole(value: object, what: str, where: str, most: int) -> int:
    number, text = value, value.strip() if isinstance(value, str) else ""
    # Digits only: int() also takes underscores and other scripts, and is slow for long texts.
    if text.isascii() and text.isdigit() and len(text) <= len(str(most)):
        number = int(text)
    if isinstance(number, int) and not isinstance(number, bool) and 0 <= number <= most:
        return number
    raise RecordError(
        f"{where}: {what} is {_short(str(value))}, expected a whole number from 0 to {most:,}."
    )


def _short(text: str) -> str:
    """Return a text of the log for a message: short, and without control characters."""
    line = text.strip()
    return ascii(line[:_SHOWN] + "..." if len(line) > _SHOWN else line)
