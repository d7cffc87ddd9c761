"""What a window asks of a card: operators that launch kernels, counted, and those that make the host wait, refused."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operators that read a value of the device, or make as many elements as values say.
WAITING = {
    "_local_scalar_dense",
    "item",
    "is_nonzero",
    "equal",
    "nonzero",
    "nonzero_static",
    "masked_select",
    "unique_dim",
    "_unique",
    "_unique2",
    "unique_consecutive",
    "bincount",
    "repeat_interleave",
    "allclose",
}
# They make or show memory, and launch nothing.
SILENT = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "record_stream"}


class WaitsError(AssertionError):
    """An operator would wait for the device."""


class Launches(TorchDispatchMode):
    """Notes the operators that launch a kernel on the card.

    Args:
        refuses: Whether an operator that makes the host wait is an error.
    """

    def __init__(self, *, refuses=True):
        super().__init__()
        self.names = []
        self.refuses = refuses

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = operator._schema.name.removeprefix("aten::")
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        on_card = any(tensor.device.type == "cuda" for tensor in given)
        if self.refuses and on_card and (name in WAITING or _indexes_by_mask(name, args)):
            raise WaitsError(f"{operator} waits for the device")
        result = operator(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        kinds = {tensor.device.type for tensor in (*given, *made) if tensor.dim() or name in ("_to_copy", "copy_")}
        if self.refuses and name in ("_to_copy", "copy_", "_copy_from") and {"cpu", "cuda"} <= kinds:
            at = args[2] if name == "copy_" and len(args) > 2 else kwargs.get("non_blocking", False)
            if not at:
                raise WaitsError(f"{operator} between the host and the card waits for the device")
        if (on_card or any(tensor.device.type == "cuda" for tensor in made)) and not _is_silent(operator, name):
            self.names.append(name)
        return result


def _indexes_by_mask(name, args):
    if name not in ("index", "index_put", "index_put_"):
        return False
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])


def _is_silent(operator, name):
    views = any(
        returned.alias_info is not None and not returned.alias_info.is_write for returned in operator._schema.returns
    )
    return views or name in SILENT or name.startswith("prim::")
