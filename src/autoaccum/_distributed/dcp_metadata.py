"""Reads what torch.distributed.checkpoint has noted of a folder, which it pickles and would unpickle whatever it is."""

from __future__ import annotations

import io
import pickle
import re
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import filesystem, metadata

from autoaccum._system import safe_files

if TYPE_CHECKING:
    from pathlib import Path

# What each rank writes; a name within the folder.
_PART = re.compile(r"__\d+_\d+\.distcp")
# More than any model takes: some hundred bytes for each part of each tensor.
_MOST_BYTES = 1 << 30
_CLASSES = (
    *(metadata.Metadata, metadata.MetadataIndex, metadata.StorageMeta, metadata.TensorProperties),
    *(metadata.TensorStorageMetadata, metadata.BytesStorageMetadata, metadata.ChunkStorageMetadata),
    *(metadata._MEM_FORMAT_ENCODING, filesystem._StorageInfo),
)


def _nowhere(*_: str) -> None:
    """Stand for the path of where a folder was written, to which nobody goes."""


_ALLOWED: dict[tuple[str, str], Any] = {
    **{(kind.__module__, kind.__name__): kind for kind in _CLASSES},
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    **{(f"pathlib{place}", kind): _nowhere for place in ("", "._local") for kind in ("PosixPath", "WindowsPath")},
}


class Reader(filesystem.FileSystemReader):
    """Reads a folder's tensors, and refuses a folder that any other program could have made code of.

    Args:
        folder: The folder.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:  # noqa: ARG002 - as the base has it
        """Return what the folder holds.

        Raises:
            pickle.UnpicklingError: The file holds more than that.
        """
        found = _Unpickler(io.BytesIO(safe_files.read(self._folder / ".metadata", _MOST_BYTES))).load()
        if not isinstance(found, metadata.Metadata) or not isinstance(found.storage_data, dict):
            raise pickle.UnpicklingError("it is none of a folder of tensors")
        for part in found.storage_data.values():
            if not isinstance(part, filesystem._StorageInfo) or not _PART.fullmatch(str(part.relative_path)):
                raise pickle.UnpicklingError("it names a file that is none of the folder's")
        if not isinstance(found.storage_meta, metadata.StorageMeta):
            found.storage_meta = metadata.StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        allowed = _ALLOWED.get((module, name))
        if allowed is None and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            allowed = getattr(torch, name)
        if allowed is None:
            raise pickle.UnpicklingError(f"{module}.{name} has no place in a folder of tensors")
        return allowed
