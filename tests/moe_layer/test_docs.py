"""The documents hold: links lead somewhere, and README's example runs as printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from moe_layer.models.synthetic import write_checkpoint

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_the_example_runs_as_printed(tmp_path: Path) -> None:
    """Two ranks, with a small checkpoint at the path that the example names and its width for DeepSeek-V3's."""
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    write_checkpoint(tmp_path / "DeepSeek-V3", "deepseek_v3", hidden=256, inter=128, values=False)
    assert "7168" in example
    check = "\nassert y.shape == x.shape and y.dtype == x.dtype and y.isfinite().all() and y.any(1).all()\n"
    (tmp_path / "example.py").write_text(example.replace("7168", "256") + check)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "example.py"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
