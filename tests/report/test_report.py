from dataclasses import replace

from report_examples import MEASURED, NOTHING_FITS, PREDICTED_ONLY, REPORT, predicted


def test_the_largest_micro_batch_is_that_which_fits_everywhere():
    assert REPORT.micro_batch == 145
    assert PREDICTED_ONLY.micro_batch == 180


def test_it_fits_only_where_it_fits_everywhere():
    half = replace(REPORT, predicted=(predicted(micro_batch=0, sizes=()),))

    assert REPORT.fits
    assert not half.fits
    assert not NOTHING_FITS.fits


def test_several_micro_batches_are_no_failure():
    assert replace(REPORT, predicted=()).fits
    assert MEASURED.plan.accum_steps == 2
