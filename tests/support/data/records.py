"""Records as `fit` would hand them to a callback, for the tests of what shows and keeps them."""

from autoaccum import Plan
from autoaccum._records import DeviceScalar  # holds a loss, in a report made by hand
from autoaccum.records import Evaluation, FitResult, MemoryEvent, ProbeResult, StepReport, Trial

MIB = 1 << 20

PLAN = Plan(100, (34, 33, 33))
TRIALS = (
    Trial(size=100, fits=False, peak_bytes=None, elapsed_s=0.5),
    Trial(size=37, fits=True, peak_bytes=500 * MIB, elapsed_s=0.25),
)
PROBE = ProbeResult(
    micro_batch=37, trials=TRIALS, limit_bytes=600 * MIB, fixed_bytes=120 * MIB, bytes_per_sample=10 * MIB
)
OOM = MemoryEvent(phase="backward", size=34, message="CUDA out of memory.")
EVALUATION = Evaluation(loss=0.5, metrics={"accuracy": 0.9375}, samples=360, elapsed_s=1.5)


class CountingScalar(DeviceScalar):
    """A loss on a device that counts how often it was waited for."""

    def __init__(self, value):
        super().__init__(value)
        self.reads = 0

    def read(self):
        self.reads += 1
        return super().read()


class LostScalar(DeviceScalar):
    """A loss on a device that is gone."""

    def read(self):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def step_report(step=1, *, loss=0.25, **changes):
    scalar = loss if isinstance(loss, DeviceScalar) else DeviceScalar(loss)
    fields = {
        "samples": 100,
        "micro_batches": PLAN.micro_batches,
        "oom_events": 0,
        "elapsed_s": 0.5,
        "peak_bytes": 512 * MIB,
        "skipped": False,
        "device_losses": {"loss": scalar},
        "device_learning_rates": (DeviceScalar(0.5),),
    }
    return StepReport(step=step, **(fields | changes))


def fit_result(history=None):
    history = [step_report(1), step_report(2)] if history is None else history
    return FitResult(
        steps=len(history),
        samples=sum(report.samples for report in history),
        history=history,
        plan=PLAN,
        plans=((1, PLAN),),
        oom_events=1,
        evaluations=(EVALUATION,),
        elapsed_s=12.5,
    )
