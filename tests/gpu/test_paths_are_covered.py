"""Every way that is taken on a card only has a test under tests/gpu, or is said to be covered elsewhere."""

import re
from pathlib import Path

import autoaccum
from folders import TESTS

PACKAGE = Path(autoaccum.__file__).parent
ON_A_CARD = TESTS / "gpu"
_ASKS_FOR_A_CARD = re.compile(r"""torch\.cuda\.|torch\.accelerator\.|get_device_module|(==|!=|in) \(?"(cuda|cpu)\"""")

# By module, the tests that take its ways of a card; a file stands for all of it.
TESTS = {
    "_training/checkpoint_contents.py": [
        "test_run_that_goes_on_from_a_checkpoint_ends_bit_for_bit_where_the_undisturbed_ends"
    ],
    "_engine/devices.py": [
        "test_card_that_is_not_there_is_named",
        "test_precision_by_default_is_what_the_card_does_well",
    ],
    "_engine/fused_loss.py": ["test_kernels_for_the_loss_of_a_head_compute_what_chunks_do"],
    "_engine/finiteness.py": ["test_nan_is_named_with_its_step", "test_on_nan_stop_ends_the_training"],
    "_engine/offloading.py": ["test_what_backward_needs_goes_to_the_host_and_back_bit_for_bit"],
    "_doctor/devices.py": ["test_doctor_finds_the_card_that_pytorch_uses"],
    "_distributed/data_parallel.py": ["test_gradients_that_are_sent_while_others_are_made_add_up_to_the_same"],
    "_memory/cuda.py": ["test_fit_finds_a_size_that_a_limit_allows_and_stays_within_it"],
    "_distributed/overlap.py": ["test_gradients_that_are_sent_while_others_are_made_add_up_to_the_same"],
    "_engine/oom_report.py": ["test_report_of_lack_of_memory_holds_the_allocators_own_record"],
    "_engine/precision.py": [
        "test_precision_by_default_is_what_the_card_does_well",
        "test_scaler_skips_an_overflow_and_goes_on",
    ],
    "_report/api.py": ["test_the_target_is_cut_in_what_fits"],
    "_report/dry_run.py": ["test_parts_add_up_to_what_tensors_held"],
    "_report/remedies.py": ["test_the_target_is_cut_in_what_fits"],
    "_engine/probing.py": ["test_the_target_is_cut_in_what_fits"],
    "_sizing/sizing.py": ["test_fit_finds_a_size_that_a_limit_allows_and_stays_within_it"],
    "_engine/logits_recipe.py": ["test_logits_that_the_card_draws_are_read_once"],
    "_loss/stand_ins.py": ["test_losses_are_asked_with_wide_copies_of_half_precision_weights_whatever_their_number"],
    "_snapshot.py": ["test_real_lack_of_memory_leaves_what_the_same_cuts_leave"],
    "_data/transfer.py": [
        "test_micro_batches_that_arrive_beside_the_computing_are_the_samples",
        "test_window_that_is_given_up_while_a_batch_is_on_its_way_harms_no_other",
    ],
    "_engine/optimizer_step.py": ["test_real_lack_of_memory_leaves_what_the_same_cuts_leave"],
}
# Modules that name a card without going another way on it, or whose way needs more than one card.
ELSEWHERE = {
    "_estimate/gpus.py": "a table of cards (tests/estimate/test_gpus.py)",
    "_cli/report.py": "asks only whether there is a card",
    "_estimate/cuda_dispatch.py": "rules about cards, for fakes (benchmarks/gpu_estimates.py)",
    "_estimate/card_properties.py": "stands in for a card (tests/estimate/test_card_properties.py)",
    "_estimate/stuck.py": "asks only whether there is a card",
    "_estimate/cudnn_kernels.py": "as _estimate/cuda_dispatch.py",
    "_estimate/estimate.py": "as _estimate/cuda_dispatch.py",
    "_launch/slurm/task.py": "chooses one of several cards (tests/launch/test_slurm_task.py stands in for them)",
    "_launch/world.py": "counts cards (tests/launch/test_world.py)",
    "_memory/__init__.py": "chooses the backend (tests/memory/test_base.py, marked gpu)",
    "_memory/available_devices.py": "asks only which devices there are (test_card_that_is_not_there_is_named)",
    "_training/packing.py": "brings tensors to the host (_training/checkpoint_contents.py's test)",
    "_training/checkpoint_schema.py": "names the device of a checkpoint (_training/checkpoint_contents.py's test)",
    "_memory/accelerator.py": "other devices than cards (tests/memory/test_base.py)",
    "_report/capacity.py": "names the kind of kernels that it has measured",
    "_estimate/tracer.py": "fakes (tests/estimate/test_tracer_quick_fakes.py)",
    "_distributed/process_group.py": "NCCL takes a card for each rank",
    "_estimate/fake_step.py": "as _estimate/cuda_dispatch.py",
    "_estimate/trace.py": "as _estimate/cuda_dispatch.py",
    "_engine/micro_batches.py": "keeps a CPU's sums apart (test_on_a_card.py goes the other way in every test)",
    "_loss/gradient_comparison.py": "how much rounding it allows where convolutions compute in TF32",
    "_engine/forward_backward.py": "keeps a CPU's weights apart (as _engine/micro_batches.py)",
}


def _asking():
    for path in sorted(PACKAGE.rglob("*.py")):
        if _ASKS_FOR_A_CARD.search(path.read_text()):
            yield path.relative_to(PACKAGE).as_posix()


def test_every_module_that_asks_for_a_card_has_a_test_on_one():
    unknown = [name for name in _asking() if name not in TESTS and name not in ELSEWHERE]

    assert not unknown, "name a test under tests/gpu for each"
    assert {*TESTS, *ELSEWHERE} == set(_asking())


def test_tests_that_are_named_are_there():
    written = "\n".join(path.read_text() for path in ON_A_CARD.glob("test_*.py"))

    assert not [name for names in TESTS.values() for name in names if f"def {name}(" not in written]


def test_make_gpu_runs_all_of_them():
    part = (PACKAGE.parents[1] / "benchmarks" / "gpu_contract.py").read_text()

    assert '"tests/gpu"' in part
    assert all("pytest.mark.gpu" in path.read_text() for path in ON_A_CARD.glob("test_*.py"))
