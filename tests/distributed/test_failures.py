"""One rank fails in each phase: the others end with errors that name this rank and the cause."""

from __future__ import annotations

import importlib
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

sys.path.append(str(Path(__file__).parents[2] / "tools" / "bench"))  # processes import it, too
cases = importlib.import_module("rank_failure_cases")


@pytest.fixture(scope="module")
def endings():
    """How the ranks of each case ended: on 2 processes, or on 3 for every third case.

    Two cases start at a time. All wait side by side, those of late ranks from the beginning.
    """
    sizes = {case: 3 if number % 3 == 0 else 2 for number, case in enumerate(cases.CASES)}
    order = sorted(cases.CASES, key=lambda case: case.fault != "late")
    starts = threading.Semaphore(2)
    with ThreadPoolExecutor(len(order)) as pool:
        ended = pool.map(lambda case: cases.run_case(case, sizes[case], busy=starts), order)
        found = dict(zip(order, ended, strict=True))
    for case in order:
        if case.fault != "late" and any("did not arrive" in each.text for each in found[case]):
            # A busy machine delayed a rank beyond the limit, before its fault: run the case alone.
            found[case] = cases.run_case(case, sizes[case], busy=starts)
    return found


@pytest.mark.parametrize("case", cases.CASES, ids=lambda each: each.name)
def test_all_ranks_end_and_name_the_first_failure(case, endings):
    assert not case.problems(endings[case])


@pytest.mark.parametrize(
    "case", [each for each in cases.CASES if each.fault == "late"], ids=lambda each: each.name
)
def test_the_error_of_a_late_rank_says_so(case, endings):
    text = endings[case][case.failing_rank].text
    assert "this rank arrived" in text
    assert (
        f"s late: rank 1 did not arrive within {cases.LIMIT_S:g} s, and the other ranks gave up"
        in text
    )


@pytest.mark.parametrize(
    "case",
    [each for each in cases.CASES if each.fault in ("exception", "^C", "^C while it waits")],
    ids=lambda each: each.name,
)
def test_the_rank_that_failed_raises_its_own_error(case, endings):
    expected = "no memory left" if case.fault == "exception" else "KeyboardInterrupt"
    assert expected in endings[case][case.failing_rank].text
