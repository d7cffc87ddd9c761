"""What a window asks of a GPU: operators that launch kernels, counted."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# They make or show memory, and launch nothing.
SILENT = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "record_stream"}


class Launches(TorchDispatchMode):
    """Notes the operators that launch a kernel on the GPU."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **kwargs or {})
        leaves = tree_leaves((args, kwargs, result))
        on_gpu = any(isinstance(leaf, torch.Tensor) and leaf.device.type == "cuda" for leaf in leaves)
        name = operator._schema.name.removeprefix("aten::")
        if on_gpu and not (operator.is_view or name in SILENT or name.startswith("prim::")):
            self.names.append(name)
        return result
