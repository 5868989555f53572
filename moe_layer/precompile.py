"""Filling the kernel cache ahead of time (``moe-layer compile``), on any machine, GPU or not.

What a layer compiles at its first step depends on its row widths, top_k, number of experts and group size, and on the
GPU's architecture; a cache filled with the same values on a build machine serves it without a compiler. The grouped
GEMMs are listed in :mod:`moe_layer.precompile_gemm`.

Kernels are compiled in as many processes as there are cores, since the compiler runs one at a time in a process.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from moe_layer.benchmarks.shapes import Shape
from moe_layer.comm.auto import fused_limit
from moe_layer.comm.encoder import encodes_columns
from moe_layer.comm.layout import align
from moe_layer.comm.spec import CombineSpec, DispatchSpec
from moe_layer.errors import ConfigError, UnsupportedDeviceError
from moe_layer.gemm.router_spec import RouterModel
from moe_layer.kernel_cache import ARCHITECTURES, cache_folder, dsl_available, stored_files
from moe_layer.quant import get_format

ID_BYTES = {"int32": 4, "int64": 8}
MAX_WORKERS = 16  # half a GiB each
FAMILIES_PER_WORKER = 4  # starting a worker, which imports PyTorch and the compiler, takes as long as some two of them


@dataclass(frozen=True)
class Family:
    """Kernels that are compiled together: a layer's dispatches, or its combines of one pair of dtypes.

    Attributes:
        arch: for which they are compiled.
        name: in words.
        build: loads or compiles them; can be pickled, so that another process may call it.
    """

    arch: str
    name: str
    build: Callable[[], Any]


def architectures(names: Sequence[str]) -> list[str]:
    """The architectures to compile for: ``names``, else those of this machine's GPUs, else all.

    Raises:
        ConfigError: an architecture without kernels.
    """
    for name in names:
        if name not in ARCHITECTURES:
            raise ConfigError(f"no kernels for architecture {name!r}; there are kernels for {', '.join(ARCHITECTURES)}")
    if names:
        return list(dict.fromkeys(names))
    import torch

    from moe_layer.backend import architecture

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    present = {architecture(torch.device("cuda", index)) for index in range(count)}
    return [arch for arch in ARCHITECTURES if arch in present or not present & set(ARCHITECTURES)]


def families(
    shapes: Sequence[Shape], ep_sizes: Sequence[int], archs: Sequence[str], ids: Sequence[str], *, fp8_combine: bool
) -> list[Family]:
    """Everything that layers of these shapes compile, a family once.

    Args:
        ids: dtypes of the ids passed to dispatch, of :data:`ID_BYTES`; the layers' own router gives int32.
        fp8_combine: also the kernels of that option.
    """
    from moe_layer.comm.launch import combine_kernels, dispatch_kernels, give_up_kernel

    def dispatch(spec: DispatchSpec, arch: str) -> Family:
        name = (
            f"dispatch of {spec.hidden_bytes} + {spec.scale_bytes} B rows, top {spec.top_k} of {spec.num_experts} "
            f"({spec.id_bytes}-byte ids), {spec.ep_size} ranks" + (", quantizing" if spec.encoder is not None else "")
        )
        return Family(arch, name, partial(dispatch_kernels, spec, arch))

    def combine(spec: CombineSpec, arch: str) -> Family:
        dtypes = {1: "E4M3", 2: "BF16", 4: "FP32"}
        name = (
            f"combine of {spec.combine_bytes} B rows, {dtypes[spec.element_bytes]} to {dtypes[spec.output_bytes]}, "
            f"{spec.ep_size} ranks"
        )
        return Family(arch, name, partial(combine_kernels, spec, arch))

    def give_up(ep_size: int, in_combine: bool, arch: str) -> Family:
        name = f"giving up {'combine' if in_combine else 'dispatch'}, {ep_size} ranks"
        return Family(arch, name, partial(give_up_kernel, ep_size, in_combine, arch))

    found: dict[tuple[str, Any], Family] = {}
    for arch in archs:
        for ep_size in ep_sizes:
            for shape in shapes:
                for name in ids:
                    spec = DispatchSpec(
                        ep_size, shape.top_k, shape.num_experts, True, align(shape.data_bytes),
                        align(shape.scale_bytes), True, ID_BYTES[name],
                    )  # fmt: skip
                    found[arch, spec] = dispatch(spec, arch)
                    encoder = get_format(shape.activation_format).kernel_encoder()
                    if encoder is not None and encodes_columns(encoder, shape.hidden_size) and fused_limit() >= 0:
                        spec = replace(spec, encoder=encoder)
                        found[arch, spec] = dispatch(spec, arch)
                for element_bytes in (1, 2, 4) if fp8_combine else (2, 4):
                    for output_bytes in (2, 4):
                        row = align(shape.hidden_size * max(2, element_bytes))
                        combined = CombineSpec(ep_size, row, element_bytes, output_bytes)
                        found[arch, combined] = combine(combined, arch)
            for in_combine in (False, True):
                found[arch, (ep_size, in_combine)] = give_up(ep_size, in_combine, arch)
    return list(found.values())


def stage_families(shapes: Sequence[Shape], ep_sizes: Sequence[int], archs: Sequence[str]) -> list[Family]:
    """The kernels around the GEMMs, indexing and finalize, with experts in contiguous blocks; a family once."""
    from moe_layer.gemm import finalize_launch, index_launch

    def index(experts: int, top_k: int, arch: str) -> Family:
        name = f"indexing of top {top_k}, {experts} local experts"
        return Family(arch, name, partial(index_launch.index_kernels, experts, top_k, 0, arch))

    def finalize(hidden: int, top_k: int, output_bytes: int, arch: str) -> Family:
        name = f"finalize of {hidden} wide rows, top {top_k}, BF16 to {'BF16' if output_bytes == 2 else 'FP32'}"
        return Family(arch, name, partial(finalize_launch.finalize_kernels, hidden, top_k, output_bytes, arch))

    found: dict[tuple[Any, ...], Family] = {}
    for arch in archs:
        for shape in shapes:
            for ep_size in ep_sizes:
                # Where they do not divide evenly, the first ranks hold one expert more.
                for experts in {shape.num_experts // ep_size, -(-shape.num_experts // ep_size)}:
                    if 0 < experts <= index_launch.MAX_EXPERTS:
                        found[arch, "index", experts, shape.top_k] = index(experts, shape.top_k, arch)
            for output_bytes in (2, 4):
                key = (arch, "finalize", shape.hidden_size, shape.top_k, output_bytes)
                found[key] = finalize(shape.hidden_size, shape.top_k, output_bytes, arch)
    return list(found.values())


def quantizer_families(shapes: Sequence[Shape], archs: Sequence[str]) -> list[Family]:
    """Quantizers of activations, at the source and after FC1, and the way back of activations and weights to BF16."""
    import torch

    from moe_layer.quant import launch

    found: dict[tuple[Any, ...], Family] = {}

    def add(what: str, spec: Any) -> None:
        for arch in archs:
            build = partial(launch.kernel, spec, arch)
            found.setdefault((arch, spec), Family(arch, what, build))

    for shape in shapes:
        activations, widths = get_format(shape.activation_format), (shape.hidden_size, shape.intermediate_size)
        for dtype, columns in zip((torch.bfloat16, torch.float32), widths):
            for kind, encode in launch.served_encoders(activations, dtype, columns).items():
                from_dtype = "BF16" if dtype == torch.bfloat16 else "FP32"
                add(f"{from_dtype} rows of {columns} to {activations.name}, for {kind} units", encode)
        for name in dict.fromkeys((shape.activation_format, shape.weight_format)):
            for columns in widths:
                for kind, decode in launch.served_decoders(get_format(name), torch.bfloat16, columns).items():
                    add(f"{name} rows of {columns} to BF16, for {kind} units", decode)
    return list(found.values())


def router_families(names: Sequence[str], archs: Sequence[str]) -> list[Family]:
    """The routers' kernels, which there are for Hopper, for gate weights in BF16 (as released); a family once."""
    from moe_layer.benchmarks.routers import get_router
    from moe_layer.gemm import router_launch

    def router(model: RouterModel, images: bool) -> Family:
        name = f"router of {model.hidden} wide rows, top {model.top_k} of {model.experts}, {model.scoring}"
        if images:
            name += ", image tokens"
        return Family(router_launch.ARCH, name, partial(router_launch.router_kernels, model, 1, images))

    if router_launch.ARCH not in archs:
        return []
    found = {get_router(name): None for name in names}
    return [router(model, images) for model, images in found if model.supported]


def compile_families(work: Sequence[Family], workers: int | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Compile each family that the cache lacks.

    Args:
        workers: processes to do it; 1: this one; None: one a core, as far as there is work for them.

    Yields:
        (position in ``work``, what became of the family: name, architecture, seconds, names of its files that are new),
        in the order in which they are done.

    Raises:
        UnsupportedDeviceError: the CuTe DSL is not installed.
        ConfigError: the cache is turned off, or cannot be written.
    """
    _usable_folder()
    if workers is None:
        workers = min(MAX_WORKERS, _cores(), -(-len(work) // FAMILIES_PER_WORKER))
    if workers <= 1:
        yield from map(_compile, enumerate(work))
        return
    # Not forked: PyTorch and the compiler have threads.
    executor = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))
    try:
        for done in as_completed([executor.submit(_compile, item) for item in enumerate(work)]):
            yield done.result()
    finally:
        executor.shutdown(cancel_futures=True)


def _cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _compile(item: tuple[int, Family]) -> tuple[int, dict[str, Any]]:
    position, family = item
    # The cache only warns where it cannot write, which is right for a layer and wrong here.
    warnings = _Collector()
    logger = logging.getLogger("moe_layer.kernel_cache")
    logger.addHandler(warnings)
    before, start = len(stored_files()), time.perf_counter()
    try:
        family.build()
    finally:
        logger.removeHandler(warnings)
    failed = [message for message in warnings.messages if "could not be written" in message]
    if failed:
        raise ConfigError(failed[0])
    seconds, new = time.perf_counter() - start, sorted(stored_files()[before:])
    return position, {"family": family.name, "arch": family.arch, "seconds": seconds, "compiled": new}


def _usable_folder() -> Path:
    folder = cache_folder()
    if folder is None:
        raise ConfigError("MOE_LAYER_CACHE=off turns the kernel cache off; unset it, or set it to a folder")
    if not dsl_available():
        raise UnsupportedDeviceError(
            "the CuTe DSL is not installed (pip install 'moe-layer[cuda]'); a cache filled elsewhere can be copied here"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the kernel cache {folder} cannot be made: {error.strerror}") from error
    return folder


def _files(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.glob("*.o")}


class _Collector(logging.Handler):
    """Keeps a logger's messages."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def run(work: Sequence[Family], *, progress: bool = True, workers: int | None = None) -> dict[str, Any]:
    """Compile and report: see :func:`compile_families`."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    done: dict[int, dict[str, Any]] = {}
    start = time.perf_counter()
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not (progress and console.is_terminal)) as bar:
        task = bar.add_task("compiling", total=len(work))
        for position, entry in compile_families(work, workers):
            done[position] = entry
            bar.update(task, advance=1, description=f"{entry['arch']}: {entry['family']}")
    folder = _usable_folder()
    files = _files(folder)
    for entry in done.values():
        entry["bytes"] = sum(files.get(name, 0) for name in entry["compiled"])
    # Two processes may have come to the same kernel.
    compiled = {name for entry in done.values() for name in entry["compiled"]}
    return {
        "folder": str(folder),
        "families": [done[position] for position in sorted(done)],
        "compiled": len(compiled),
        "compiled_bytes": sum(files.get(name, 0) for name in compiled),
        "seconds": time.perf_counter() - start,
        "cache_files": len(files),
        "cache_bytes": sum(files.values()),
    }


def print_report(report: dict[str, Any]) -> None:
    """The report as a table."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for column in ("arch", "kernels", "new", "KiB", "s"):
        table.add_column(
            column, justify="left" if column in ("arch", "kernels") else "right", no_wrap=column != "kernels"
        )
    for entry in report["families"]:
        new = len(entry["compiled"])
        table.add_row(
            entry["arch"], entry["family"], str(new) if new else "there", f"{entry['bytes'] / 1024:.0f}" if new else "",
            f"{entry['seconds']:.1f}",
        )  # fmt: skip
    console.print(table)
    console.print(
        f"{report['compiled']} kernels compiled, {report['compiled_bytes'] / 1024:.0f} KiB, in "
        f"{report['seconds']:.1f} s; "
        f"the cache has {report['cache_files']}, {report['cache_bytes'] / 1024:.0f} KiB: {report['folder']}",
        markup=False,
    )
