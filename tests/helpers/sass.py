"""Reads a CUBIN: what ptxas reports about it, its instructions and the paths between them.

Uses NVIDIA's ``cuobjdump`` (which runs ``nvdisasm``): from the packages nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm
where installed, else from PATH.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*);")
_RESOURCE = re.compile(r"\b(REG|STACK|SHARED|LOCAL):(\d+)")


@cache
def tool_folder() -> Path | None:
    """The folder that holds both tools, or None."""
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(f) / "cu13" / "bin" for f in (spec.submodule_search_locations or ())] if spec else []
    found = shutil.which("cuobjdump")
    if found:
        folders.append(Path(found).parent)
    for folder in folders:
        if all(os.access(folder / tool, os.X_OK) for tool in ("cuobjdump", "nvdisasm")):
            return folder
    return None


@dataclass(frozen=True)
class Instruction:
    """One instruction: opcode with its modifiers, guarding predicate or "", operands as printed."""

    address: int
    opcode: str
    predicate: str
    operands: str

    def is_a(self, pattern: str) -> bool:
        """Whether the whole opcode matches the regular expression."""
        return re.fullmatch(pattern, self.opcode) is not None


class Machine:
    """The machine code of the one kernel in a CUBIN, or of the one whose name contains ``kernel``.

    Attributes:
        registers, stack, shared, local: ptxas' figures: registers a thread, and bytes.
        code: the instructions in address order.
    """

    def __init__(self, cubin: bytes, folder: Path, kernel: str = "") -> None:
        path = folder / "kernel.cubin"
        path.write_bytes(cubin)
        usage = _only(kernel, _run("--dump-resource-usage", str(path)))
        figures = {name: int(value) for name, value in _RESOURCE.findall(usage)}
        self.registers, self.stack = figures["REG"], figures["STACK"]
        self.shared, self.local = figures["SHARED"], figures["LOCAL"]
        self.code = parse(_only(kernel, _run("-sass", str(path))))
        self._index = {instruction.address: i for i, instruction in enumerate(self.code)}

    def all(self, pattern: str, among: Iterable[int] | None = None) -> list[int]:
        """Positions of the instructions whose opcode matches, of all or of ``among``."""
        positions = range(len(self.code)) if among is None else sorted(among)
        return [i for i in positions if self.code[i].is_a(pattern)]

    def reachable(self, start: Iterable[int], avoiding: Callable[[Instruction], bool] | None = None) -> set[int]:
        """Positions on some path that begins at ``start`` and runs through no instruction to avoid."""
        seen: set[int] = set()
        waiting = list(start)
        while waiting:
            i = waiting.pop()
            if i in seen or (avoiding is not None and avoiding(self.code[i])):
                continue
            seen.add(i)
            waiting += self.successors(i)
        return seen

    def successors(self, i: int) -> list[int]:
        """Where execution can go from position i; a guarded or divergent branch both ways."""
        instruction = self.code[i]
        following = [i + 1] if i + 1 < len(self.code) else []
        kind = instruction.opcode.split(".")[0]
        if kind in ("EXIT", "RET", "KILL"):
            return following if instruction.predicate else []
        if kind in ("BRA", "CALL", "JMP"):
            target = re.search(r"(0x[0-9a-f]+)\s*$", instruction.operands)
            if target is None:
                raise ValueError(f"no target in {instruction}")
            there = self._index[int(target[1], 16)]
            always = kind != "CALL" and not instruction.predicate and instruction.operands.strip() == target[1]
            return [there] if always else [there, *following]
        if kind in ("BRX", "JMX"):
            raise ValueError(f"a branch to a computed address: {instruction}")
        return following


def _only(kernel: str, text: str) -> str:
    """What a listing says about the kernel whose name contains ``kernel``; all of it for an empty name."""
    if not kernel:
        return text
    found = [part for part in re.split(r"(?m)^\s*Function\b", text)[1:] if kernel in part.splitlines()[0]]
    if len(found) != 1:
        raise ValueError(f"{len(found)} kernels are called {kernel!r}")
    return found[0]


def parse(text: str) -> list[Instruction]:
    """The instructions in what ``cuobjdump -sass`` prints for one kernel."""
    code = []
    for line in text.splitlines():
        found = _LINE.match(line)
        if found:
            address, predicate, opcode, operands = found.groups()
            code.append(Instruction(int(address, 16), opcode, predicate or "", operands))
    addresses = [instruction.address for instruction in code]
    if not code or addresses != sorted(set(addresses)):
        raise ValueError(f"not the listing of one kernel: {len(code)} instructions")
    return code


def _run(*arguments: str) -> str:
    folder = tool_folder()
    assert folder is not None
    environment = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"}
    done = subprocess.run(
        [str(folder / "cuobjdump"), *arguments], env=environment, capture_output=True, text=True, timeout=120
    )
    if done.returncode != 0:
        raise RuntimeError(f"cuobjdump {' '.join(arguments)} failed: {done.stderr.strip()}")
    return done.stdout
