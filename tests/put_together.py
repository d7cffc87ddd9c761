"""Parts of the engine, put together as `fit` does it, for tests of packages."""

from autoaccum._engine.assembly import assemble
from autoaccum._engine.events import Events
from autoaccum._engine.options import Options
from autoaccum._engine.runner import WindowRunner
from autoaccum._memory.available_devices import backend_for
from autoaccum._sizing.sizing import Cutting, Sizing, SizingOptions
from autoaccum._system.notices import Notices
from helpers import CPU


def training_step(model, loss=None, optimizer=None, *, memory=None, precision="fp32", notices=None, **options):
    """A training step put together as `fit` does, on the CPU unless a memory backend says otherwise."""
    asked = Options(loss=loss, optimizer=optimizer, precision=precision, **options)
    return assemble(model, asked, memory=memory or backend_for(CPU), notices=notices or Notices(silent=True))


def runner_of(step, plan, *, cutting=None, notices=None, callbacks=()):
    """What makes the windows of a training step that is put together already; `cutting` in place of `plan`."""
    events = Events(callbacks)
    sizing = Sizing(step.memory, lambda: step.parameters, cutting or Cutting.of(plan), SizingOptions(), events)
    return WindowRunner(step, sizing, events, notices or Notices(silent=True))
