"""What every test gets: seeded generators, and a guard against whatever would leak into the next test."""

from support.processes import kept_bytecode  # noqa: F401 - first, since what follows is large

# isort: split

import functools
import gc
import itertools
import logging
import os
import random
import signal
import sys
import threading

import numpy as np
import pytest
import torch
from hypothesis import settings

from autoaccum._system.output import write_line  # the terminal's own line
from support.processes import sharing_out
from support.ranks.pool import RankPool

try:
    import resource
except ImportError:  # Windows
    resource = None

# Examples wait for kernels and for the machine's other work: a deadline would only measure that. CI tries the same ones
# in every run, so that a change is judged by what it changed.
settings.register_profile("autoaccum", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("autoaccum")

# Tiny operators on several threads spend their time waiting for each other, all the more where another worker has the
# other cores. Tests of what kernels take ask for two; processes that tests start have as many as they would have.
torch.set_num_threads(1)

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# nohup and shells leave signals ignored for what they start in the background, and that passes on to every process that
# a test starts.
for _name, _handler in (("SIGINT", signal.default_int_handler), ("SIGHUP", signal.SIG_DFL)):
    if hasattr(signal, _name) and signal.getsignal(getattr(signal, _name)) == signal.SIG_IGN:
        signal.signal(getattr(signal, _name), _handler)
# The compiler would keep threads that compile in the background for as long as the process lives.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
_modules_kept_out = 0
# Hooks on all modules, by when they are called.
_HOOKS = {
    name: getattr(torch.nn.modules.module, f"_global_{name}_hooks")
    for name in ("forward_pre", "forward", "backward_pre", "backward", "module_registration", "parameter_registration")
} | {"forward with kwargs": torch.nn.modules.module._global_forward_hooks_with_kwargs}
_LIMITS = [] if resource is None else [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
# Without a GPU torch.manual_seed notes for each kind of GPU who called it, for when there is one.
_seed = functools.partial(torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed, 0)
# PyTorch 2.8 calls the driver for each operator on a fake CUDA tensor.
_LACKS_DRIVER = torch.__version__ < "2.9" and not torch.cuda.is_available()
# Set by pytest for each phase of a test, and by scikit-learn and torch's compiler when they are first imported.
_FOREIGN_VARIABLES = ("PYTEST_", "KMP_", "PYTORCH_NVML", "TORCHINDUCTOR_", "_TORCHINDUCTOR_", "TRITON_")


def pytest_collection_modifyitems(items):
    sharing_out.first_those_of_ranks(items)
    for item in items:
        if item.get_closest_marker("sweep"):  # of many cases, which a busy machine does not end in a test's time
            item.add_marker(pytest.mark.timeout(3600))
    if _LACKS_DRIVER:
        for item in items:
            if item.get_closest_marker("gpu_fakes"):  # or it aborts the process, or runs another
                item.add_marker(pytest.mark.skip(reason="PyTorch 2.8 calls the driver, and there is none here"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """Skip what the oldest PyTorch refuses to predict here."""
    report = yield
    if _LACKS_DRIVER and report.failed and "an operator needs a CUDA driver" in report.longreprtext:
        report.outcome, report.longrepr = "skipped", (str(item.path), 0, "PyTorch 2.8 predicts for a GPU only with one")
    return report


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return sharing_out.scheduler(config, log) if config.getvalue("dist") == "loadfile" else None


def process_state():
    """What a test must leave as it found it, by name."""
    return {
        "resource limits": {limit: resource.getrlimit(limit) for limit in _LIMITS},
        "environment": {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN_VARIABLES)},
        "signal handlers": {number: signal.getsignal(number) for number in _SIGNALS},
        "default dtype": torch.get_default_dtype(),
        "torch threads": torch.get_num_threads(),
        "gradient mode": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "hooks on all modules": {name: list(hooks) for name, hooks in _HOOKS.items()},
        "stance of the compiler": _stance(),
    }


def _stance():
    """Whether compiled functions run compiled; the compiler is not imported for it."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    return "default" if compiler is None else compiler._stance.stance


def put_back(state):
    for limit, bounds in state["resource limits"].items():
        resource.setrlimit(limit, bounds)
    for name in os.environ.keys() - state["environment"].keys():
        if not name.startswith(_FOREIGN_VARIABLES):
            del os.environ[name]
    os.environ.update(state["environment"])
    for number, handler in state["signal handlers"].items():
        signal.signal(number, handler)
    torch.set_default_dtype(state["default dtype"])
    torch.set_num_threads(state["torch threads"])
    torch.set_grad_enabled(state["gradient mode"])
    torch.use_deterministic_algorithms(state["deterministic algorithms"])
    for name, hooks in _HOOKS.items():
        for key in set(hooks) - set(state["hooks on all modules"][name]):
            del hooks[key]
    if _stance() != state["stance of the compiler"]:
        torch.compiler.set_stance(state["stance of the compiler"])


class _ToStderr(logging.Handler):
    """Writes to the stderr of the time, as the package does where no handler takes its lines."""

    def emit(self, record):
        write_line(f"autoaccum: {record.getMessage()}")


@pytest.fixture(autouse=True)
def lines_on_stderr():
    logger, handler = logging.getLogger("autoaccum"), _ToStderr()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    report = logging.getLogger("autoaccum.report")  # of which nothing is shown unless somebody asks
    report.setLevel(logging.WARNING)
    yield
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)
    report.setLevel(logging.NOTSET)


@pytest.fixture(scope="session", autouse=True)
def nothing_kept_out_at_the_end():
    yield
    gc.unfreeze()


def _keep_out():
    global _modules_kept_out  # noqa: PLW0603
    gc.collect()
    gc.freeze()
    _modules_kept_out = len(sys.modules)


@pytest.fixture(scope="module", autouse=True)
def short_collections_after_other_modules(nothing_kept_out_at_the_end):
    """Keeps what earlier tests left in caches out of garbage collections, as torch's of operators on fake tensors."""
    _keep_out()


@pytest.fixture(autouse=True)
def short_collections(nothing_kept_out_at_the_end):
    """Keeps what is imported out of garbage collections: memory is given back hundreds of times in these tests.

    Much of it comes late, as a part of torch that the first optimizer brings does: so this looks again before each
    test.
    """
    if len(sys.modules) > _modules_kept_out + 20:
        _keep_out()


@pytest.fixture(scope="session")
def plan_folders(tmp_path_factory):
    """Folders in one of their own: pytest goes through all that it has made whenever it makes another."""
    parent = tmp_path_factory.mktemp("plans")
    return (parent / str(number) for number in itertools.count())


@pytest.fixture(autouse=True)
def plan_cache_of_its_own(no_leaks, monkeypatch, plan_folders):
    """Keeps what a test finds out from the user's own plans, and from other tests."""
    folder = next(plan_folders)
    folder.mkdir()
    monkeypatch.setenv("AUTOACCUM_CACHE_DIR", str(folder))


@pytest.fixture(autouse=True)
def no_leaks():
    """Fails a test that leaves the process changed, and changes it back so that the next one is not blamed."""
    _seed()
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - the global generator, which models draw from
    before, threads = process_state(), set(threading.enumerate())
    yield
    after = process_state()
    changed = [f"{name}: {before[name]} -> {after[name]}" for name in before if before[name] != after[name]]
    if changed:
        put_back(before)
    left = [thread for thread in threading.enumerate() if thread not in threads and not thread.daemon]
    for thread in left:
        thread.join(timeout=10)
    assert not changed, f"left changed: {', '.join(changed)}"
    assert not any(thread.is_alive() for thread in left), f"left running: {left}"


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    """A sample that does not fit alone is tried again at once, and not after a second in which memory may come back."""
    monkeypatch.setattr("autoaccum._sizing.backoff.WAITS_S", (0.0, 0.001, 0.001))


@pytest.fixture
def accelerate_as_it_was(monkeypatch):
    """Transformers 4 sets variables of Accelerate's."""
    monkeypatch.setenv("ACCELERATE_USE_IPEX", "false")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")


@pytest.fixture
def two_threads():
    """For tests of what a kernel takes: by one thread oneDNN is passed over for pointwise convolutions."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def rank_pool():
    """Four processes for tests of several ranks, started when they are first needed."""
    members = RankPool(4)
    yield members
    members.close()
