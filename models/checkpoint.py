"""A safetensors checkpoint on disk, sharded or not, read lazily and never trusted.

Files are opened when first needed, through ``safe_open``, which checks a file's header against its length and maps the
rest: :meth:`Checkpoint.tensor` is a view of the page cache, not a copy. Pickle is never loaded.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import TracebackType
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open

from moe_layer.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")

DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64,
}  # fmt: skip
"""Bits of an element of each safetensors dtype."""


@dataclass(frozen=True)
class TensorInfo:
    """A tensor as a file header describes it: safetensors' dtype name and the shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        count = 1
        for d in self.shape:
            count *= d
        return count * DTYPE_BITS.get(self.dtype, 0) // 8

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


class Checkpoint:
    """The tensors of a checkpoint by name.

    Args:
        path: a folder with ``model.safetensors.index.json`` and its shards or with a single ``.safetensors`` file, or
            such a file.

    Raises:
        CheckpointError: nothing readable there, only pickles, or an index that names a file outside the folder.

    A context manager: leaving it closes the files. Tensors taken from it stay valid.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._handles: dict[str, Any] = {}
        self._files: dict[str, str] = {}
        if self.path.is_file():
            if self.path.suffix != ".safetensors":
                self._refuse_file()
            self.folder, self.index = self.path.parent, None
            self._only = self.path.name
        elif self.path.is_dir():
            self.folder = self.path
            self.index = self._find_index()
            self._only = "" if self.index else self._find_single()
        else:
            raise CheckpointError(f"{self.path}: no such file or folder")
        if self.index:
            self._files = self._read_index(self.index)
        else:
            self._files = dict.fromkeys(self._open(self._only).keys(), self._only)

    # ---- names ----

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    @cached_property
    def _sorted(self) -> list[str]:
        return sorted(self._files)

    def names_under(self, module: str) -> list[str]:
        """Names of all tensors of ``module``, i.e. those that start with ``module + "."``, sorted."""
        prefix = module + "."
        # "/" is the character after ".", so this range holds exactly the names with that prefix.
        return self._sorted[bisect_left(self._sorted, prefix) : bisect_left(self._sorted, module + "/")]

    @property
    def files(self) -> list[str]:
        """File names, relative to the folder, in order."""
        return sorted(set(self._files.values()))

    def file_of(self, name: str) -> str:
        """The file, relative to the folder, that the tensor is said to be in."""
        if name not in self._files:
            raise CheckpointError(f"{self.path}: no tensor {name}")
        return self._files[name]

    # ---- headers and data ----

    def info(self, name: str) -> TensorInfo:
        """dtype and shape, from the file's header alone."""
        part = self._get(name, "get_slice")
        return TensorInfo(name, part.get_dtype(), tuple(part.get_shape()))

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor, on the CPU. Pages are read when touched; do not write to it."""
        return self._get(name, "get_tensor")

    def slice(self, name: str) -> Any:
        """safetensors' lazy slice of the tensor: index it to read a part."""
        return self._get(name, "get_slice")

    def storage_order(self, names: list[str]) -> list[str]:
        """``names`` in the order in which they lie on disk, file by file."""
        position: dict[str, int] = {}
        for file in sorted({self.file_of(n) for n in names}):
            handle = self._open(file)
            ordered = handle.offset_keys() if hasattr(handle, "offset_keys") else handle.keys()
            position.update({n: len(position) + i for i, n in enumerate(ordered)})
        return sorted(names, key=lambda n: position.get(n, -1))

    def close(self) -> None:
        """Close all files. They open again if needed."""
        for handle in self._handles.values():
            handle.__exit__(None, None, None)
        self._handles.clear()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # ---- files ----

    def _get(self, name: str, method: str) -> Any:
        file = self.file_of(name)
        try:
            return getattr(self._open(file), method)(name)
        except SafetensorError as error:
            if self.index and "does not contain" in str(error):
                error_text = f"{self.index.name} places tensor {name} in it, but it holds no such tensor"
                raise CheckpointError(f"{self.folder / file}: {error_text}") from None
            raise CheckpointError(f"{self.folder / file}: tensor {name} cannot be read: {error}") from None

    def _open(self, file: str) -> Any:
        if file not in self._handles:
            path = self.folder / file
            if not path.is_file():
                raise CheckpointError(f"{path}: missing shard; it should hold {self._count(file)} tensors")
            try:
                self._handles[file] = safe_open(str(path), framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                size = path.stat().st_size
                raise CheckpointError(f"{path}: truncated or damaged ({size} bytes): {error}") from None
        return self._handles[file]

    def _count(self, file: str) -> int:
        return sum(f == file for f in self._files.values())

    def _find_index(self) -> Path | None:
        standard = self.folder / INDEX_NAME
        if standard.is_file():
            return standard
        others = sorted(self.folder.glob("*.safetensors.index.json"))
        if len(others) > 1:
            raise CheckpointError(f"{self.folder}: {len(others)} indices and none called {INDEX_NAME}")
        return others[0] if others else None

    def _find_single(self) -> str:
        files = sorted(p.name for p in self.folder.glob("*.safetensors"))
        if SINGLE_NAME in files or len(files) == 1:
            name = SINGLE_NAME if SINGLE_NAME in files else files[0]
            self._check_inside(name, "the folder holds")
            return name
        if files:
            raise CheckpointError(f"{self.folder}: {len(files)} .safetensors files but no {INDEX_NAME}")
        pickles = sorted(p.name for p in self.folder.iterdir() if p.suffix in PICKLE_SUFFIXES)
        if pickles:
            raise CheckpointError(
                f"{self.folder}: only pickled weights ({pickles[0]}), which are never loaded because unpickling runs "
                "code from the file; convert them to safetensors"
            )
        raise CheckpointError(f"{self.folder}: no .safetensors files")

    def _refuse_file(self) -> NoReturn:
        if self.path.suffix in PICKLE_SUFFIXES:
            raise CheckpointError(
                f"{self.path}: pickled weights are never loaded because unpickling runs code from the file; "
                "convert them to safetensors"
            )
        raise CheckpointError(f"{self.path}: expected a checkpoint folder or a .safetensors file")

    def _read_index(self, index: Path) -> dict[str, str]:
        try:
            raw = json.loads(index.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{index}: cannot be read as JSON: {error}") from None
        weight_map = raw.get("weight_map") if isinstance(raw, Mapping) else None
        if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
            raise CheckpointError(f"{index}: expected an object weight_map of tensor name to file name")
        for file in sorted(set(weight_map.values())):
            self._check_inside(file, f"{index.name} names")
        return weight_map

    def _check_inside(self, file: str, who: str) -> None:
        """Refuse a file name that leads out of the checkpoint folder, directly or through a link.

        The Hugging Face cache is the one exception: its snapshot folders hold links into the ``blobs`` folder of the
        same repository.
        """
        plain, windows = PurePosixPath(file), PureWindowsPath(file)
        if not file or plain.is_absolute() or windows.drive or windows.root or ".." in windows.parts:
            raise CheckpointError(f"{self.folder}: {who} {file!r}, which is outside the checkpoint folder")
        home = self.folder.resolve()
        allowed = [home]
        if home.parent.name == "snapshots":
            allowed.append(home.parent.parent / "blobs")
        target = (home / file).resolve()
        if not any(target.is_relative_to(folder) for folder in allowed):
            raise CheckpointError(f"{self.folder}: {who} {file!r}, a link to {target} outside the checkpoint folder")
