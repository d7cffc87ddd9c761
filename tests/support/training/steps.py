"""Parts of the engine, put together as `fit` does it, for tests of packages."""

from autoaccum._engine.assembly import assemble  # a step without a runner, for tests of the parts
from autoaccum._engine.options import Options  # a step without a runner, for tests of the parts
from autoaccum._memory.available_devices import backend_for  # a step without a runner, for tests of the parts
from autoaccum._system.notices import Notices  # a step without a runner, for tests of the parts
from support.models.small import CPU


def training_step(model, loss=None, optimizer=None, *, memory=None, precision="fp32", notices=None, **options):
    """A training step put together as `fit` does, on the CPU unless a memory backend says otherwise."""
    asked = Options(loss=loss, optimizer=optimizer, precision=precision, **options)
    return assemble(model, asked, memory=memory or backend_for(CPU), notices=notices or Notices(silent=True))
