"""Spin searches every run of the protocol models: the protocols hold, and without any one of their parts they do not.

docs/protocols.md says what the models are, numbers the invariants and lists what is left out. A variant leaves a part
out (a preprocessor symbol in the .pml files) and must end in a wrong row or a hang.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

MODELS = Path(__file__).parent
MISSING = [tool for tool in ("spin", "gcc") if shutil.which(tool) is None]
pytestmark = pytest.mark.skipif(
    bool(MISSING), reason=f"needs {' and '.join(MISSING)} (Debian: apt-get install spin gcc libc6-dev)"
)

MEMORY_MB = 1800  # a search takes 0.9 GB at most; two run at once in CI
SEARCH_TIMEOUT_S = 540  # half a minute at most on an idle core
MAX_DEPTH = 20_000  # the deepest run has about 3000 steps

# What a search may end in.
HOLDS = "every run ends, and none violates an assertion"
WRONG_ROW = "an assertion fails"
HANG = "a rank waits for ever"

ONE_SLOT = ("SLOTS=1",)  # 3 ranks, 3 steps, T^ of each step 0 or 1, every routing of one token a rank
TWO_SLOTS = ("SLOTS=2",)  # T^ of each step 1 or 2, one rank with up to two tokens
TWO_RANKS = (*TWO_SLOTS, "P=2", "STEPS=4")

# The protocols as they are, and the alternatives that docs/protocols.md calls equally safe.
INTACT = [
    ("mixed", ONE_SLOT),
    ("mixed", TWO_RANKS),
    ("mixed", (*TWO_RANKS, "SENTINEL_HAS_ITS_OWN_WORKSPACE", "NO_ENTRY_WAIT", "NO_SENTINEL_ANNOUNCEMENT")),
    ("sentinel", TWO_SLOTS),
    ("sentinel", ONE_SLOT),
    ("sentinel", (*ONE_SLOT, "P=2", "STEPS=5")),
    ("fence", TWO_SLOTS),
    ("fence", ONE_SLOT),
    ("fence", (*ONE_SLOT, "P=2", "STEPS=5")),
    ("fence", (*ONE_SLOT, "WAIT_EQUAL")),
    ("fence", (*ONE_SLOT, "ONE_FLAG_WORD")),
    ("fence", (*ONE_SLOT, "SEPARATE_COUNT")),
]

# What is left out or done otherwise, and what comes of it.
BROKEN = [
    ("fence", (*ONE_SLOT, "NO_RELEASE_DISPATCH"), WRONG_ROW),
    ("fence", (*ONE_SLOT, "NO_ACQUIRE_DISPATCH"), WRONG_ROW),
    ("fence", (*ONE_SLOT, "NO_FLAG_DISPATCH"), WRONG_ROW),
    ("fence", (*ONE_SLOT, "NO_RELEASE_COMBINE"), WRONG_ROW),
    ("fence", (*ONE_SLOT, "NO_ACQUIRE_COMBINE"), WRONG_ROW),
    ("fence", (*ONE_SLOT, "NO_FLAG_COMBINE"), WRONG_ROW),
    ("fence", (*ONE_SLOT, "ANNOUNCE_BEFORE_COMPUTE"), WRONG_ROW),
    ("fence", (*ONE_SLOT, "WAIT_TARGETS_ONLY"), WRONG_ROW),
    ("fence", (*TWO_SLOTS, "RELAXED_DONE"), WRONG_ROW),
    ("fence", (*ONE_SLOT, "NO_COUNT"), WRONG_ROW),
    ("fence", (*ONE_SLOT, "SEPARATE_COUNT", "COUNT_AFTER_RELEASE"), WRONG_ROW),
    ("fence", (*ONE_SLOT, "NO_SANITIZE"), WRONG_ROW),
    ("fence", (*ONE_SLOT, "NO_RESET_COUNTERS"), WRONG_ROW),
    ("fence", (*ONE_SLOT, "NO_RESET_DONE"), HANG),
    ("fence", (*ONE_SLOT, "T0_LAUNCHES_NOTHING"), HANG),
    ("fence", (*ONE_SLOT, "ONE_FLAG_WORD", "WAIT_EQUAL"), HANG),
    ("sentinel", (*ONE_SLOT, "ONE_BANK"), HANG),
    ("sentinel", (*ONE_SLOT, "NO_RESET_LANDING"), WRONG_ROW),
    ("sentinel", (*ONE_SLOT, "NO_RESET_IDS"), WRONG_ROW),
    ("sentinel", (*ONE_SLOT, "NO_RESET_HEADER"), HANG),
    ("sentinel", (*ONE_SLOT, "NO_RESET_RESULT"), WRONG_ROW),
    ("sentinel", (*ONE_SLOT, "LANDING_RESET_AFTER_RESULTS"), HANG),
    ("sentinel", (*ONE_SLOT, "RESULT_RESET_AFTER_NEXT_HEADERS"), HANG),
    ("sentinel", (*ONE_SLOT, "META_RESET_AFTER_NEXT_HEADERS"), HANG),
    ("sentinel", (*ONE_SLOT, "NO_BARE_HEADERS"), HANG),
    ("sentinel", (*ONE_SLOT, "OWN_T_ONLY"), HANG),
    ("sentinel", (*ONE_SLOT, "EMPTY_STEP_EXCHANGES_NOTHING"), HANG),
    ("sentinel", (*ONE_SLOT, "POLL_FIRST_PAYLOAD_WORD"), WRONG_ROW),
    ("sentinel", (*ONE_SLOT, "POLL_NO_IDS"), WRONG_ROW),
    ("sentinel", (*ONE_SLOT, "POLL_FIRST_RESULT_WORD"), WRONG_ROW),
    ("sentinel", (*ONE_SLOT, "PAYLOAD_HOLDS_SENTINEL"), HANG),
    ("sentinel", (*TWO_SLOTS, "LANDING_STRIDE_T_HAT"), WRONG_ROW),
    ("mixed", (*ONE_SLOT, "NO_ENTRY_WAIT"), WRONG_ROW),
    ("mixed", (*ONE_SLOT, "NO_SENTINEL_ANNOUNCEMENT"), HANG),
    ("mixed", (*ONE_SLOT, "ANNOUNCE_BEFORE_COMPUTE"), WRONG_ROW),
    ("mixed", (*TWO_RANKS, "NO_ENTRY_WAIT"), WRONG_ROW),
    ("mixed", (*ONE_SLOT, "ONE_BANK"), HANG),
]


@dataclass(frozen=True)
class Search:
    """How a search ended, and pan's report."""

    verdict: str
    report: str


def run(command: list[str], folder: Path, limit_s: float) -> str:
    """Output of a command that must succeed."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=limit_s)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def search(model: str, symbols: tuple[str, ...], folder: Path, *, optimize: str) -> Search:
    """Search every run of ``model``.pml under ``symbols``; an incomplete search is an error."""
    sources = {path.name: path.read_text() for path in MODELS.glob("*.pml")}
    for symbol in symbols:
        name = symbol.split("=")[0]
        assert any(re.search(rf"\b{name}\b", text) for text in sources.values()), f"no model knows {name}"
    for name, text in sources.items():
        (folder / name).write_text(text)
    run(["spin", "-a", *(f"-D{symbol}" for symbol in symbols), f"{model}.pml"], folder, 60)
    options = ["-DSAFETY", "-DCOLLAPSE", "-DVECTORSZ=2048", f"-DMEMLIM={MEMORY_MB}"]
    run(["gcc", optimize, "-w", *options, "-o", "pan", "pan.c"], folder, 120)
    report = run(["./pan", f"-m{MAX_DEPTH}", "-n"], folder, SEARCH_TIMEOUT_S)
    assert "max search depth too small" not in report and "out of memory" not in report, report
    if "errors: 0" in report:
        assert "Search not completed" not in report, report
        return Search(HOLDS, report)
    assert "errors: 1" in report, report
    return Search(HANG if "invalid end state" in report.split("\n(")[0] else WRONG_ROW, report)


def label(case: str | tuple[str, ...]) -> str:
    return case if isinstance(case, str) else " ".join(case)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("model", "symbols"), INTACT, ids=label)
def test_protocol_holds(model: str, symbols: tuple[str, ...], tmp_path: Path) -> None:
    result = search(model, symbols, tmp_path, optimize="-O1")
    assert result.verdict == HOLDS, result.report


@pytest.mark.parametrize(("model", "symbols", "verdict"), BROKEN, ids=label)
def test_nothing_is_superfluous(model: str, symbols: tuple[str, ...], verdict: str, tmp_path: Path) -> None:
    result = search(model, (*symbols, "VARIANT"), tmp_path, optimize="-O0")
    assert result.verdict == verdict, result.report


@pytest.mark.parametrize(
    ("model", "symbol", "invariant"),
    [
        ("sentinel", "EMPTY_STEP_EXCHANGES_NOTHING", "finished[(n-1)]"),  # I1
        ("fence", "WAIT_TARGETS_ONLY", "computed[n]"),  # I2
        ("mixed", "NO_ENTRY_WAIT", "==1)&&(pend["),  # I3: W_d not used up
        ("sentinel", "ONE_BANK", "==3)&&(pend["),  # I3: a meta slot not reset
    ],
)
def test_invariants_can_fail(model: str, symbol: str, invariant: str, tmp_path: Path) -> None:
    """The models as they are also assert I1, I2 and I3, ahead of any harm."""
    result = search(model, (*ONE_SLOT, symbol), tmp_path, optimize="-O0")
    assert result.verdict == WRONG_ROW, result.report
    assert invariant in result.report.split("assertion violated", 1)[1].splitlines()[0], result.report


@pytest.mark.parametrize("model", ["fence", "sentinel", "mixed"])
def test_search_reaches_the_last_step(model: str, tmp_path: Path) -> None:
    """A model that stopped early, or got stuck in a way that Spin accepts, would hold for want of anything to check."""
    result = search(model, (*ONE_SLOT, "ASSERT_NO_END"), tmp_path, optimize="-O0")
    assert result.verdict == WRONG_ROW and "finished[n]" in result.report, result.report
