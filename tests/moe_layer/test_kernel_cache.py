"""The kernel cache: a kernel is compiled once, stored whole, found again, and never taken for another."""

from __future__ import annotations

import importlib.util
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_layer import kernel_cache
from moe_layer.errors import UnsupportedDeviceError

pytest.importorskip("cutlass", reason="needs the CuTe DSL (pip install 'moe-layer[cuda]')")

from moe_layer.comm.routing import give_up  # the smallest kernel
from moe_layer.comm.spec import GiveUpSpec

SPEC, SIGNATURE, ARCH = GiveUpSpec(2, False), "lli", "sm_90a"


class Compiler:
    """Counts the compiler's calls."""

    def __init__(self, real: Callable[..., Any]) -> None:
        self.real, self.calls = real, 0

    def __call__(self, *arguments: Any) -> Any:
        self.calls += 1
        return self.real(*arguments)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    counting = Compiler(kernel_cache._compile)
    monkeypatch.setattr(kernel_cache, "_compile", counting)
    return counting


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, and a process that knows no kernel."""
    monkeypatch.setenv("MOE_LAYER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(kernel_cache, "_memory", {})
    yield tmp_path / "cache"


def get(spec: GiveUpSpec = SPEC, arch: str = ARCH) -> Callable[..., None]:
    return kernel_cache.get_kernel(give_up, spec, SIGNATURE, arch)


def forget() -> None:
    """As in another process."""
    kernel_cache._memory.clear()


def check_loaded(kernel: Callable[..., None]) -> None:
    """A kernel from disk. No GPU is needed to see which: it names itself and its arguments and refuses a CPU tensor."""
    with pytest.raises(ValueError, match=r"`give_up\(anchor: Tensor.*uint8.*ws: int64, peers: int64, rank: int32\)`"):
        kernel(torch.zeros(1, dtype=torch.uint8), 0, 0, 0)


def test_compiled_once_and_kept(folder: Path, compiler: Compiler) -> None:
    first = get()
    assert get() is first
    assert compiler.calls == 1
    (stored,) = folder.iterdir()
    assert stored.name.startswith(f"give_up-{ARCH}-")

    forget()
    again = get()
    assert compiler.calls == 1, "compiled although it lay on disk"
    assert again is not first
    check_loaded(again)
    assert list(folder.iterdir()) == [stored]


@pytest.mark.parametrize("damage", ["empty", "garbage", "cut"])
def test_damaged_file(folder: Path, compiler: Compiler, caplog: pytest.LogCaptureFixture, damage: str) -> None:
    get()
    (stored,) = folder.iterdir()
    good = stored.read_bytes()
    stored.write_bytes({"empty": b"", "garbage": b"\x00" * 1000, "cut": good[: len(good) // 2]}[damage])
    forget()
    with caplog.at_level(logging.WARNING):
        assert callable(get())
    assert compiler.calls == 2
    assert f"{stored} could not be loaded" in caplog.text
    # Replaced by a good one.
    forget()
    check_loaded(get())
    assert compiler.calls == 2


def test_switched_off(folder: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MOE_LAYER_CACHE", "off")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    get()
    forget()
    get()
    assert compiler.calls == 2
    assert list(tmp_path.iterdir()) == []


def test_default_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for unset in (None, ""):
        if unset is None:
            monkeypatch.delenv("MOE_LAYER_CACHE", raising=False)
        else:
            monkeypatch.setenv("MOE_LAYER_CACHE", unset)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert kernel_cache.cache_folder() == tmp_path / "moe_layer" / "kernels"
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        assert kernel_cache.cache_folder() == tmp_path / "home" / ".cache" / "moe_layer" / "kernels"


def test_folder_that_cannot_be_written(
    folder: Path, compiler: Compiler, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It costs the cache, not the kernel."""
    folder.parent.mkdir(exist_ok=True)
    folder.write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        assert callable(get())
    assert "could not be written" in caplog.text
    assert folder.read_text() == "a file where the folder should be"


def test_failed_export_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A process that dies or runs out of disk half-way must not leave what another one would load."""

    class Kernel:
        def export_to_c(self, path: str, function_name: str) -> None:
            Path(path).write_bytes(b"the first half")
            raise OSError("no space left on device")

    monkeypatch.setattr(kernel_cache, "_compile", lambda *arguments: Kernel())
    with caplog.at_level(logging.WARNING):
        assert isinstance(get(), Kernel)
    assert "no space left on device" in caplog.text
    assert list(folder.iterdir()) == []


def test_threads_compile_once(folder: Path, compiler: Compiler) -> None:
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(get())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 4
    assert all(kernel is found[0] for kernel in found)
    assert compiler.calls == 1


def test_specs_and_architectures_apart(folder: Path, compiler: Compiler) -> None:
    kernels = [get(), get(GiveUpSpec(3, False)), get(GiveUpSpec(2, True)), get(arch="sm_100a")]
    assert len({id(kernel) for kernel in kernels}) == compiler.calls == len(list(folder.iterdir())) == 4


@dataclass(frozen=True)
class Spec:
    width: int
    narrow: Any


def test_key_holds_all_that_the_code_depends_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import cutlass

    package = tmp_path / "package"
    package.mkdir()
    (package / "kernels.py").write_text("def launch(): ...\ndef other(): ...\n")
    (package / "vocabulary.py").write_text("NUMBER = 1\n")
    module_spec = importlib.util.spec_from_file_location("kernels_of_a_test", package / "kernels.py")
    assert module_spec is not None and module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    monkeypatch.setitem(sys.modules, "kernels_of_a_test", module)
    module_spec.loader.exec_module(module)

    spec = Spec(16, False)
    key = kernel_cache._key(module.launch, spec, ARCH)
    assert kernel_cache._key(module.launch, Spec(16, False), ARCH) == key
    others = [
        kernel_cache._key(module.other, spec, ARCH),
        kernel_cache._key(module.launch, replace(spec, width=17), ARCH),
        kernel_cache._key(module.launch, replace(spec, narrow=True), ARCH),
        kernel_cache._key(module.launch, spec, "sm_103a"),
    ]
    with monkeypatch.context() as newer:
        newer.setattr(cutlass, "__version__", "99.0")
        others.append(kernel_cache._key(module.launch, spec, ARCH))
    # A file that the kernel's own imports: every file of its package counts.
    (package / "vocabulary.py").write_text("NUMBER = 2\n")
    kernel_cache._source_digest.cache_clear()
    others.append(kernel_cache._key(module.launch, spec, ARCH))
    # Code that the spec brings along, from another package.
    (tmp_path / "formats").mkdir()
    (tmp_path / "formats" / "code.py").write_text(
        "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass Code:\n    bits: int\n"
    )
    code_spec = importlib.util.spec_from_file_location("code_of_a_test", tmp_path / "formats" / "code.py")
    assert code_spec is not None and code_spec.loader is not None
    code = importlib.util.module_from_spec(code_spec)
    monkeypatch.setitem(sys.modules, "code_of_a_test", code)
    code_spec.loader.exec_module(code)
    for text in ("", "NUMBER = 3\n"):
        (tmp_path / "formats" / "vocabulary.py").write_text(text)
        kernel_cache._source_digest.cache_clear()
        others.append(kernel_cache._key(module.launch, Spec(16, code.Code(8)), ARCH))
    assert len({key, *others}) == 1 + len(others)


def test_machines_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(UnsupportedDeviceError, match=r"A100 has compute capability 8\.0; kernels exist for 9\.0"):
        kernel_cache.device_arch("cuda:0")
    for capability, arch in (((9, 0), "sm_90a"), ((10, 0), "sm_100a"), ((10, 3), "sm_103a")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        assert kernel_cache.device_arch("cuda:0") == arch
    monkeypatch.setattr(kernel_cache, "dsl_available", lambda: False)
    with pytest.raises(UnsupportedDeviceError, match=r"DSL is not installed \(pip install 'moe-layer\[cuda\]'\)"):
        kernel_cache.device_arch("cuda:0")
