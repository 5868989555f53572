"""Compiled CuTe DSL kernels: in memory, on disk, and ahead of time.

A kernel's key is everything its machine code depends on: the launch function, the spec it is specialised for, the GPU
architecture, the DSL's version and the source of the packages that the function and the spec's parts live in. A kernel
found on disk is loaded in milliseconds and needs no compiler; one that is not is compiled (a fraction of a second) and
stored. Set ``MOE_LAYER_CACHE`` to choose the folder, or to ``off`` for none.

Like ``errors``, this module imports none of the library's packages, so all of them may use it. The DSL's compiler is
not thread-safe (cutlass#3398), so a lock guards it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

from moe_layer.errors import UnsupportedDeviceError

logger = logging.getLogger(__name__)
ARCHITECTURES = ("sm_90a", "sm_100a", "sm_103a")
_ARCH_OF_CAPABILITY = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a"}
_memory: dict[tuple[str, str, str], Callable[..., None]] = {}
_stored: list[str] = []
_lock = threading.Lock()


def dsl_available() -> bool:
    """Whether the CuTe DSL can be imported (it is not imported here)."""
    from importlib.util import find_spec

    return find_spec("cutlass") is not None


def device_arch(device: Any) -> str:
    """The architecture to compile for on a CUDA device.

    Raises:
        UnsupportedDeviceError: no kernels for this GPU, or the CuTe DSL is missing.
    """
    import torch

    capability = torch.cuda.get_device_capability(device)
    if capability not in _ARCH_OF_CAPABILITY:
        raise UnsupportedDeviceError(
            f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}; kernels "
            "exist for 9.0, 10.0 and 10.3. protocol='collective' and the PyTorch reference run here"
        )
    if not dsl_available():
        raise UnsupportedDeviceError(
            "the CuTe DSL is not installed (pip install 'moe-layer[cuda]'); protocol='collective' and the PyTorch "
            "reference run without it"
        )
    return _ARCH_OF_CAPABILITY[capability]


def cache_folder() -> Path | None:
    """Where compiled kernels are kept, or None for nowhere."""
    setting = os.environ.get("MOE_LAYER_CACHE")
    if setting == "off":
        return None
    if setting:
        return Path(setting)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "moe_layer" / "kernels"


@cache
def _source_digest(folder: str) -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(folder).glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _key(launch: Any, spec: Any, arch: str) -> str:
    import cutlass

    # Code that a spec brings along, such as a number format's arithmetic, lives in a package of its own.
    parts = [getattr(spec, field.name) for field in fields(spec)] if is_dataclass(spec) else []
    modules = [launch.__module__, *(type(part).__module__ for part in parts if is_dataclass(part))]
    sources = [_source_digest(str(Path(str(sys.modules[name].__file__)).parent)) for name in dict.fromkeys(modules)]
    text = "\n".join((launch.__module__, launch.__name__, repr(spec), arch, cutlass.__version__, *sources))
    return f"{launch.__name__}-{arch}-{hashlib.sha256(text.encode()).hexdigest()[:24]}"


def compile_artifacts(launch: Any, spec: Any, signature: str, arch: str) -> Any:
    """Compile without caching; the result's ``artifacts`` hold PTX and CUBIN (for inspection and tests)."""
    with tempfile.TemporaryDirectory() as folder:  # the DSL writes both to files as well
        options = f"--enable-tvm-ffi --gpu-arch {arch} --keep-ptx --keep-cubin --dump-dir {folder}"
        return _compile(launch, spec, signature, options)


def _compile(launch: Any, spec: Any, signature: str, options: str) -> Any:
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    types = {"l": cutlass.Int64, "i": cutlass.Int32, "u": cutlass.Uint32, "f": cutlass.Float32}
    anchor = make_fake_tensor(cutlass.Uint8, (cute.sym_int(),), (1,), assumed_align=1)
    scalars = [types[code](0) for code in signature]
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(launch, spec, anchor, *scalars, stream, options=options)


@cache
def anchor(device: Any) -> Any:
    """A uint8 tensor of one dimension on a CUDA device: what tells a launch where to run."""
    import torch

    return torch.zeros(1, dtype=torch.uint8, device=device)


def get_kernel(launch: Any, spec: Any, signature: str, arch: str) -> Callable[..., None]:
    """The compiled ``launch(anchor, *scalars)``, from memory, disk or the compiler.

    Args:
        launch: a ``cute.jit`` function ``(spec: Constexpr, anchor: cute.Tensor, *scalars, stream)``.
        spec: a frozen dataclass; its repr is part of the key.
        signature: the scalars' types, a letter each: ``l`` Int64, ``i`` Int32, ``u`` Uint32, ``f`` Float32.
        arch: one of :data:`ARCHITECTURES`.

    Returns:
        A callable of (uint8 CUDA tensor, scalars) that launches on the tensor's device and torch's current stream.
    """
    memory_key = (f"{launch.__module__}.{launch.__name__}", repr(spec), arch)
    found = _memory.get(memory_key)
    if found is None:
        with _lock:
            found = _memory.get(memory_key) or _load_or_compile(launch, spec, signature, arch)
            _memory[memory_key] = found
    return found


def stored_files() -> list[str]:
    """Names of the files that this process has put into the cache, in order."""
    return list(_stored)


def _load_or_compile(launch: Any, spec: Any, signature: str, arch: str) -> Callable[..., None]:
    folder = cache_folder()
    key = _key(launch, spec, arch)
    symbol = "kernel_" + key.rsplit("-", 1)[1]
    path = None if folder is None else folder / f"{key}.o"
    if path is not None and path.exists():
        try:
            return _load(path, symbol)
        except Exception as error:  # a damaged or foreign file must not stop the program: compile afresh
            logger.warning("kernel cache: %s could not be loaded (%s); compiling again", path, error)
    compiled = _compile(launch, spec, signature, f"--enable-tvm-ffi --gpu-arch {arch}")
    if path is not None:
        _store(compiled, path, symbol)
    return compiled


def _load(path: Path, symbol: str) -> Callable[..., None]:
    import cutlass.cute as cute

    return getattr(cute.runtime.load_module(str(path), enable_tvm_ffi=True), symbol)


def _store(compiled: Any, path: Path, symbol: str) -> None:
    """Write the object file whole or not at all; a folder that cannot be written costs only the cache."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".o")
        os.close(handle)
        compiled.export_to_c(temporary, function_name=symbol)
        os.replace(temporary, path)
        _stored.append(path.name)
    except Exception as error:
        logger.warning("kernel cache: %s could not be written (%s)", path, error)
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
