"""What a report tells, in words that the terminal and the page share: a row is a report and its phrases, in order."""

import html
import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from autoaccum._report.records import Pace
from support.data.reports import DEVICE, GIB, MEASURED, MIB, NOTHING_FITS, PREDICTED_ONLY, REPORT, predicted


def foreseen(*places, **changes):
    return replace(PREDICTED_ONLY, predicted=places, **changes)


def measured(**changes):
    return replace(REPORT, measured=replace(MEASURED, **changes), predicted=())


def remedy_of(size, most):
    subject = replace(REPORT.subject, max_micro_batch=most)
    return replace(REPORT, subject=subject, remedies=(replace(REPORT.remedies[0], micro_batch=size),))


PLAN = "Largest micro-batch and plan"

TOLD = {
    "a verdict for each place, the measured one first": (
        REPORT,
        "256 in 2 micro-batches, 128+128, measured",
        "256 or more at once, predicted",
        "256 in 2 micro-batches, 128+128, predicted",
    ),
    "a window, and the larger micro-batch that was asked about": (
        foreseen(predicted("h100-80gb", 79 * GIB, 512), predicted("l4", 22 * GIB, 546)),
        "256 at once, 512 or more would fit, predicted",
        "256 at once, 546 would fit, predicted",
        PLAN,
        "h100-80gb 512 or more",
        "l4 546",
    ),
    "why nothing fits": (
        NOTHING_FITS,
        "a sample of shape (3, 224, 224) does not fit",
        "a micro-batch of 1 is predicted to take 260.0 MiB",
    ),
    "a peak above the limit that counts as fitting": (
        measured(device=replace(DEVICE, room_bytes=5300 * MIB, limit_bytes=5300 * MIB)),
        "; its peak is 40.0 MiB (0.8%) above the limit, and on the CPU up to 3% above it count as fitting",
    ),
    "how much more it may take": (
        foreseen(replace(predicted(), safe_micro_batch=0, uncertainty=0.141)),
        "256 or more at once, predicted; it may take 14.1% more",
    ),
    "more at once than fit are required": (
        replace(PREDICTED_ONLY, required_micro_batch=200),
        "256 in 2 micro-batches, 128+128, predicted; 200 at once are required",
    ),
    "a measured size is safe": (REPORT, PLAN, "measured 145 145 128+128"),
    "neighbours with what they hold": (REPORT, "process 4242 python3, 5.0 GiB", "process 7 Xorg, an unknown share"),
    "what CUDA takes": (
        foreseen(predicted(total=GIB)),
        "l4 1.0 GiB less 448.0 MiB for CUDA, which leaves 576.0 MiB",
    ),
    "a limit": (foreseen(replace(predicted(), room_bytes=2 * GIB)), "for CUDA", "; limit 2.0 GiB"),
    "what was measured beside what is foreseen": (
        REPORT,
        "Memory of a step measured l4 rtx-3070",
        "optimizer state 86.0 MiB 86.0 MiB 86.0 MiB",
        "outside tensors 20.0 MiB 20.0 MiB 20.0 MiB",
        "peak in all 5.2 GiB 10.2 GiB 5.2 GiB",
    ),
    "on the host, what counts beside the model": (
        measured(device=replace(DEVICE, holds_model=False)),
        "excluding model 5.2 GiB",
    ),
    "times of every size": (
        measured(pace=Pace(0.0123, 0.000568, 7530, 209.8, 50_000, 0.254)),
        "optimizer step 2:05:30: 2 micro-batches, 12.3 ms the largest; optimizer 0.568 ms",
        "an epoch 0.25 s for",
    ),
    "what would help": (
        REPORT,
        "What would help on l4",
        "save_memory='checkpoint' micro-batches of 128 (120 safely), 6.0 GiB",
    ),
    "help for the target": (remedy_of(256, None), "micro-batches of 256 or more"),
    "help for the largest of interest": (remedy_of(128, 128), "micro-batches of 128 or more"),
    "choices, and notes on predictions": (
        replace(REPORT, notes=(*REPORT.notes, "counted in bf16.")),
        "Chosen by default",
        "AdamW(lr=1e-3) (optimizer=)",
        "About the predictions",
        "counted in bf16.",
    ),
    "markup as it is": (replace(REPORT, warnings=("loss '[red]x[/red]' is odd",)), "loss '[red]x[/red]' is odd"),
}


def on_a_wide_terminal(report):
    console = Console(file=io.StringIO(), width=400)
    console.print(report)
    return re.sub("─+", "", console.file.getvalue())


def on_the_page(report):
    return html.unescape(re.sub("<[^>]*>", " ", report.to_html().partition("</style>")[2]))


@pytest.mark.parametrize("shown", [on_a_wide_terminal, on_the_page])
@pytest.mark.parametrize("name", TOLD)
def test_the_report_tells(name, shown):
    report, *phrases = TOLD[name]

    text = " ".join(shown(report).split())

    assert re.search(".*".join(map(re.escape, phrases)), text), text


def test_nothing_is_said_of_what_would_help_where_nothing_was_tried():
    assert "What would help" not in str(PREDICTED_ONLY)
