"""Every scenario of the faults that others shipped is a test here, or stands below with the reason."""

from __future__ import annotations

import re
from pathlib import Path

SCENARIOS = [
    "B01",
    "B03",
    "B04",
    "B05",
    "B07",
    "B08",
    "B09",
    "B10",
    "B11",
    "B12",
    "B13",
    "B15",
    "B16",
    "B18",
    "B19",
    "B20",
    "B22",
    "B23",
    "B24",
    "B25",
    "B26",
    "B27",
    "B29",
    "B30",
    "B31",
    "B32",
    "B34",
    "B35",
    "B36",
    "B38",
    "B39",
    "B41",
    "B42",
    "B44",
    "B45",
    "B46",
    "B48",
    "B49",
    "B51",
    "B52",
    "B53",
    "B54",
    "B55",
    "B57",
    "B58",
    "B59",
    "B60",
    "B62",
    "B63",
    "B64",
    "B65",
    "B66",
]

ELSEWHERE = {
    "B44": "test_draft.py::test_target_is_untouched_when_the_draft_raises",
    "B60": "test_selection.py::test_every_combination_is_taken_or_refused_for_a_listed_reason",
    "B65": "contracts/test_layer_of_kernels.py::test_one_page",
}
"""Scenarios whose test stands beside the module that it is about."""

PENDING = {
    "B51": "one pool group only so far: every pool of the cache has the same slots",
    "B52": "context parallelism does not exist yet",
}
"""Scenarios without a test of their own, and why."""

PARTLY = {
    "B01": "address arithmetic alone; on both sides of 2 and 4 GiB, contracts/test_triton_offsets.py reads the traced "
    "programs, and reads and writes need a card: test_forms_gpu.py and contracts/test_limits_*.py::test_b01_*",
    "B27": "translation of tables alone; there is no host tier yet",
    "B29": "copies of host arrays; overlapping steps on a card follow with the asynchronous engine",
    "B62": "layouts of stages; running two stages follows with pipeline meshes",
}
"""Scenarios of which some part waits."""


def numbers_with_tests() -> set[str]:
    """Numbers in the names of the tests of this folder."""
    sources = Path(__file__).parent.glob("test_*.py")
    return {f"B{n}" for source in sources for n in re.findall(r"def test_b(\d\d)_", source.read_text())}


def test_every_scenario_is_tested_or_listed():
    assert len(SCENARIOS) == len(set(SCENARIOS)) == 52
    groups = numbers_with_tests(), set(ELSEWHERE), set(PENDING)
    assert set().union(*groups) == set(SCENARIOS)
    assert sum(map(len, groups)) == 52, "a scenario that is tested now must leave the list"
    assert set(PARTLY) <= numbers_with_tests()


def test_tests_elsewhere_exist():
    for place in ELSEWHERE.values():
        name, _, function = place.partition("::")
        assert f"def {function}(" in (Path(__file__).parents[1] / name).read_text(), place


def test_every_reason_says_something():
    assert all(len(reason) > 20 for reason in (PENDING | PARTLY).values())
