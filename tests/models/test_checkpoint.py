"""Files on disk: what is opened, what is refused, and what the messages say."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from moe_layer import CheckpointError
from moe_layer.models import checkpoint as module
from moe_layer.models.checkpoint import INDEX_NAME, Checkpoint, TensorInfo


def tensors() -> dict[str, torch.Tensor]:
    near = {"a.1x.weight": torch.randn(2), "a.1-x": torch.randn(3), "a.1": torch.randn(1)}
    return {f"a.{i}.weight": torch.randn(4, 8) for i in range(4)} | near | {"b": torch.ones(())}


def write_sharded(folder: Path, contents: dict[str, torch.Tensor]) -> dict[str, str]:
    """Even tensors in one file, odd ones in another."""
    weight_map = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(contents)}
    for file in sorted(set(weight_map.values())):
        save_file({n: contents[n] for n, f in weight_map.items() if f == file}, str(folder / file))
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.fixture(params=["single", "sharded", "file"])
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    contents = tensors()
    if request.param == "sharded":
        write_sharded(tmp_path, contents)
        return tmp_path, contents
    save_file(contents, str(tmp_path / "model.safetensors"))
    return (tmp_path if request.param == "single" else tmp_path / "model.safetensors"), contents


def test_names_headers_and_data(stored: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, contents = stored
    with Checkpoint(path) as ckpt:
        assert set(ckpt) == set(contents) and len(ckpt) == len(contents)
        assert "a.1.weight" in ckpt and "a.0" not in ckpt
        # what is in module a.1, not a.1 itself, a.1x or a.1-x, which sort around it
        assert ckpt.names_under("a.1") == ["a.1.weight"]
        assert len(ckpt.names_under("a")) == 7 and ckpt.names_under("b") == []
        assert ckpt.info("a.2.weight") == TensorInfo("a.2.weight", "F32", (4, 8))
        assert ckpt.info("a.2.weight").nbytes == 128 and ckpt.info("b").shape == ()
        for name, tensor in contents.items():
            assert torch.equal(ckpt.tensor(name), tensor)
        assert torch.equal(ckpt.slice("a.3.weight")[1:3], contents["a.3.weight"][1:3])
        kept = ckpt.tensor("a.0.weight")
    assert torch.equal(kept, contents["a.0.weight"])  # valid after the files are closed


def test_files_open_when_needed_and_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weight_map = write_sharded(tmp_path, tensors())
    opened, closed = [], []

    class Spy:
        def __init__(self, path: str, **options: object) -> None:
            opened.append(os.path.basename(path))
            self.inner = safe_open(path, **options)

        def __getattr__(self, name: str) -> object:
            return getattr(self.inner, name)

        def __exit__(self, *error: object) -> None:
            closed.append(self)
            self.inner.__exit__(*error)

    monkeypatch.setattr(module, "safe_open", Spy)
    with Checkpoint(tmp_path) as ckpt:
        assert opened == []
        for _ in range(2):
            ckpt.tensor("a.0.weight")
        assert opened == [weight_map["a.0.weight"]]
    assert len(closed) == 1


def test_storage_order_is_that_of_the_files(tmp_path: Path) -> None:
    contents = tensors()
    write_sharded(tmp_path, contents)
    with Checkpoint(tmp_path) as ckpt:
        order = ckpt.storage_order(sorted(contents, reverse=True))
    expected = []
    for file in ("part-0.safetensors", "part-1.safetensors"):
        raw = (tmp_path / file).read_bytes()
        header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        expected += sorted((n for n in header if n != "__metadata__"), key=lambda n: header[n]["data_offsets"][0])
    assert order == expected


# ---- damage ----


@pytest.mark.parametrize("cut", [1, 40, 10_000])
def test_truncated_file(stored: tuple[Path, dict[str, torch.Tensor]], cut: int) -> None:
    path, _ = stored
    folder = path if path.is_dir() else path.parent
    file = sorted(folder.glob("*.safetensors"))[0]
    size = max(0, file.stat().st_size - cut)
    os.truncate(file, size)
    with pytest.raises(CheckpointError, match=rf"{file}: truncated or damaged \({size} bytes\)"):
        Checkpoint(path).tensor("a.0.weight")


@pytest.mark.parametrize(
    "content", [b"", b"version https://git-lfs.github.com/spec/v1\n", b"\xff" * 64, b"PK\x03\x04" * 20]
)
def test_not_safetensors(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{file}: truncated or damaged \({len(content)} bytes\)"):
        Checkpoint(tmp_path)


def test_header_that_points_past_the_end(tmp_path: Path) -> None:
    header = json.dumps({"x": {"dtype": "F32", "shape": [1000], "data_offsets": [0, 4000]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(CheckpointError, match="truncated or damaged"):
        Checkpoint(tmp_path)


def test_missing_shard(tmp_path: Path) -> None:
    write_sharded(tmp_path, tensors())
    (tmp_path / "part-1.safetensors").unlink()
    with Checkpoint(tmp_path) as ckpt:
        ckpt.tensor("a.0.weight")  # other files serve
        with pytest.raises(CheckpointError, match=r"part-1.safetensors: missing shard; it should hold 4 tensors"):
            ckpt.info("a.1.weight")


def test_index_that_names_the_wrong_file(tmp_path: Path) -> None:
    weight_map = write_sharded(tmp_path, tensors())
    write_index(tmp_path, {**weight_map, "a.1.weight": "part-0.safetensors"})
    with Checkpoint(tmp_path) as ckpt:
        for read in (ckpt.info, ckpt.tensor, ckpt.slice):
            with pytest.raises(CheckpointError, match=rf"part-0.*{INDEX_NAME} places tensor a\.1\.weight in it"):
                read("a.1.weight")
        with pytest.raises(CheckpointError, match=r"no tensor a\.9\.weight"):
            ckpt.tensor("a.9.weight")


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_damaged_index(tmp_path: Path, content: str) -> None:
    (tmp_path / INDEX_NAME).write_text(content)
    with pytest.raises(CheckpointError, match=rf"{INDEX_NAME}: (cannot be read as JSON|expected an object weight_map)"):
        Checkpoint(tmp_path)


# ---- paths ----


@pytest.mark.parametrize(
    "file",
    ["/etc/passwd", "../outside.safetensors", "sub/../../outside.safetensors", "C:\\x.safetensors", "..\\x", "\\x", ""],
)
def test_index_that_leads_outside(tmp_path: Path, file: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(tensors(), str(tmp_path / "outside.safetensors"))
    write_index(folder, {"a.0.weight": file})
    with pytest.raises(CheckpointError, match=r"index.json names '.*', which is outside the checkpoint folder"):
        Checkpoint(folder)


@pytest.mark.parametrize("through", ["index", "single file", "folder"])
def test_links_that_lead_outside(tmp_path: Path, through: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(tensors(), str(tmp_path / "outside.safetensors"))
    if through == "index":
        (folder / "link.safetensors").symlink_to(tmp_path / "outside.safetensors")
        write_index(folder, {"a.0.weight": "link.safetensors"})
    elif through == "folder":
        (folder / "sub").symlink_to(tmp_path)
        write_index(folder, {"a.0.weight": "sub/outside.safetensors"})
    else:
        (folder / "model.safetensors").symlink_to(tmp_path / "outside.safetensors")
    with pytest.raises(CheckpointError, match=r"a link to .*outside\.safetensors outside the checkpoint folder"):
        Checkpoint(folder)


def test_links_of_the_hugging_face_cache(tmp_path: Path) -> None:
    """Snapshots are links into blobs/ of the same repository, and only those may leave the folder."""
    contents = tensors()
    repo = tmp_path / "models--org--name"
    snapshot = repo / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    save_file(contents, str(repo / "blobs" / "0123"))
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123")
    with Checkpoint(snapshot) as ckpt:
        assert torch.equal(ckpt.tensor("a.0.weight"), contents["a.0.weight"])
    (tmp_path / "model-link").symlink_to(snapshot)  # the folder itself may be a link
    assert "a.0.weight" in Checkpoint(tmp_path / "model-link")

    (repo / "other").mkdir()
    (repo / "blobs" / "0123").rename(repo / "other" / "0123")
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to("../../other/0123")
    with pytest.raises(CheckpointError, match="outside the checkpoint folder"):
        Checkpoint(snapshot)


def test_subfolders_and_inner_links_are_allowed(tmp_path: Path) -> None:
    contents = tensors()
    (tmp_path / "sub").mkdir()
    save_file(contents, str(tmp_path / "sub" / "real.safetensors"))
    (tmp_path / "link.safetensors").symlink_to("sub/real.safetensors")
    write_index(tmp_path, {"a.0.weight": "sub/real.safetensors", "a.1.weight": "link.safetensors"})
    with Checkpoint(tmp_path) as ckpt:
        for name in ("a.0.weight", "a.1.weight"):
            assert torch.equal(ckpt.tensor(name), contents[name])


# ---- what is no checkpoint ----


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("pickle-ran",)


def test_pickle_is_never_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("pytorch_model.bin", "model.pt"):
        file = tmp_path / name
        torch.save(Bomb(), file)
        for path in (tmp_path, file):
            with pytest.raises(CheckpointError, match=rf"{name}.*never loaded.*convert them to safetensors"):
                Checkpoint(path)
        file.unlink()
    assert not (tmp_path / "pickle-ran").exists()


def test_safetensors_beside_pickles_are_read(tmp_path: Path) -> None:
    torch.save(Bomb(), tmp_path / "pytorch_model.bin")
    save_file(tensors(), str(tmp_path / "model.safetensors"))
    assert "b" in Checkpoint(tmp_path)


def test_no_checkpoint_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nothing: no such file or folder"):
        Checkpoint(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match=rf"{tmp_path}: no \.safetensors files"):
        Checkpoint(tmp_path)
    (tmp_path / "weights.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"weights\.gguf: expected a checkpoint folder or a \.safetensors file"):
        Checkpoint(tmp_path / "weights.gguf")
    for name in "ab":
        save_file(tensors(), str(tmp_path / f"{name}.safetensors"))
    with pytest.raises(CheckpointError, match=rf"2 \.safetensors files but no {INDEX_NAME}"):
        Checkpoint(tmp_path)
    for name in "ab":
        (tmp_path / f"{name}.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match=rf"2 indices and none called {INDEX_NAME}"):
        Checkpoint(tmp_path)
