"""Reports as `preflight` would make them, for the tests of what shows them. The estimates are made by hand."""

from dataclasses import replace

from autoaccum import Plan
from autoaccum._estimate.footprint import AliveMemory, Footprint  # parts of a report made by hand
from autoaccum._estimate.gpus import GPU  # parts of a report made by hand
from autoaccum._records import Neighbour  # parts of a report made by hand
from autoaccum._report import Remedy, Report  # parts of a report made by hand
from autoaccum._report.records import DeviceFacts, Measured, Pace, Predicted, Subject  # parts of a report made by hand
from autoaccum.records import Trial

MIB, GIB = 1 << 20, 1 << 30

SUBJECT = Subject("ResNet", 11_181_642, 11_181_642, "Adam", 256, "train.py:job")
REMEDIES = (
    Remedy("checkpoint", 6 * GIB, 128, 120),
    Remedy("chunked_loss", 5 * GIB, 64, 60),
)


def footprint(size, *, fixed=200 * MIB, each=40 * MIB, phase="backward"):
    """A footprint of which a part is the same for every size and a part grows."""
    parts = {
        "parameters_bytes": 43 * MIB,
        "buffers_bytes": 1 * MIB,
        "gradients_bytes": 43 * MIB,
        "optimizer_bytes": 86 * MIB,
        "inputs_bytes": size * MIB,
        "activations_bytes": size * (each - MIB),
        "loss_bytes": 0,
        "workspace_bytes": 0,
        "temporary_bytes": fixed - 173 * MIB,
    }
    peak = sum(parts.values())
    alive = (
        AliveMemory("activations", "layer1.conv", "aten.convolution.default", 2, parts["activations_bytes"] // 2),
        AliveMemory("parameters", "head", "", 1, 40 * MIB),
    )
    return Footprint(
        size=size,
        phase=phase,
        peak_bytes=peak,
        reserved_bytes=peak + 20 * MIB,
        **parts,
        alive=alive,
    )


SIZES = (1, 2, 128, 256)


def gpu(name="l4", total=22 * GIB):
    return GPU(name, total, 448 * MIB, (8, 0), source="https://example.org/gpu")


def predicted(name="l4", total=22 * GIB, micro_batch=256, sizes=(256,)):
    of, taken = gpu(name, total), footprint(max(sizes, default=1))
    more = micro_batch > 0 and footprint(micro_batch + 1).reserved_bytes <= of.free_bytes
    return Predicted(
        of,
        "bf16",
        0.1,
        of.free_bytes,
        micro_batch,
        micro_batch,
        Plan(256, sizes) if sizes else None,
        taken,
        curve=tuple((size, footprint(size).reserved_bytes) for size in SIZES),
        bytes_per_sample=40 * MIB,
        is_capped=more,
        notes=("counted in bf16.",),
    )


DEVICE = DeviceFacts(
    name="NVIDIA GeForce RTX 3060",
    device="cuda:0",
    total_bytes=12 * GIB,
    free_bytes=7 * GIB,
    room_bytes=6 * GIB,
    limit_bytes=None,
    holds_model=True,
    others_bytes=5 * GIB,
    neighbours=(Neighbour(4242, "python3", 5 * GIB), Neighbour(7, "Xorg", None)),
)
TRIALS = (
    Trial(2, fits=True, peak_bytes=300 * MIB, elapsed_s=0.05),
    Trial(8, fits=True, peak_bytes=540 * MIB, elapsed_s=0.07),
    Trial(128, fits=True, peak_bytes=5340 * MIB, elapsed_s=0.61),
    Trial(150, fits=False, peak_bytes=None, elapsed_s=0.31),
    Trial(145, fits=True, peak_bytes=6020 * MIB, elapsed_s=0.7),
)
MEASURED = Measured(
    DEVICE,
    "bf16",
    TRIALS,
    micro_batch=145,
    plan=Plan(256, (128, 128)),
    fixed_bytes=220 * MIB,
    bytes_per_sample=40 * MIB,
    footprint=footprint(128),
    pace=Pace(0.6, 0.02, 1.22, 209.8, 50_000, 238.3),
)
REPORT = Report(
    subject=SUBJECT,
    measured=MEASURED,
    predicted=(predicted(), predicted("rtx-3070", 8 * GIB, 180, (128, 128))),
    warnings=("BatchNorm: 20 layers in training mode normalise by each micro-batch's own mean and variance.",),
    notes=("AdamW(lr=1e-3) (optimizer=)",),
    remedies=REMEDIES,
    remedies_on="l4",
)
PREDICTED_ONLY = replace(REPORT, measured=None, warnings=(), remedies=())
NOTHING_FITS = replace(
    REPORT,
    measured=Measured(
        DEVICE,
        "bf16",
        (TRIALS[3],),
        0,
        None,
        reason="a sample of shape (3, 224, 224) does not fit on NVIDIA GeForce RTX 3060",
    ),
    predicted=(predicted("tiny", GIB, 0, ()),),
)
MANY_GPUS = replace(PREDICTED_ONLY, predicted=tuple(predicted(f"gpu-{n}", (8 + n) * GIB) for n in range(6)))
