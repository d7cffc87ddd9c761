"""Reads torch.distributed.checkpoint's metadata safely: the library would unpickle whatever the file contains."""

from __future__ import annotations

import io
import pickle
import re
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import filesystem, metadata

from autoaccum._system import files

if TYPE_CHECKING:
    from pathlib import Path

# A rank's file, as a name within the folder.
_PART = re.compile(r"__\d+_\d+\.distcp")
# More than any model needs: a few hundred bytes for each part of each tensor.
_MOST_BYTES = 1 << 30
_CLASSES = (
    *(metadata.Metadata, metadata.MetadataIndex, metadata.StorageMeta, metadata.TensorProperties),
    *(metadata.TensorStorageMetadata, metadata.BytesStorageMetadata, metadata.ChunkStorageMetadata),
    *(metadata._MEM_FORMAT_ENCODING, filesystem._StorageInfo),
)


def _nowhere(*_: str) -> None:
    """Stand in for the path that a folder was written to, which is not used."""


_ALLOWED: dict[tuple[str, str], Any] = {
    **{(kind.__module__, kind.__name__): kind for kind in _CLASSES},
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    **{(f"pathlib{place}", kind): _nowhere for place in ("", "._local") for kind in ("PosixPath", "WindowsPath")},
}


class Reader(filesystem.FileSystemReader):
    """Reads a folder's tensors, and rejects metadata that could execute code when unpickled.

    Args:
        folder: The folder.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:  # noqa: ARG002 - as the base has it
        """Return the folder's metadata.

        Raises:
            pickle.UnpicklingError: The file contains anything else.
        """
        found = _Unpickler(io.BytesIO(files.read(self._folder / ".metadata", _MOST_BYTES))).load()
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
