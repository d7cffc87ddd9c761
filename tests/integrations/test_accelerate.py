"""What `auto_accumulate` refuses in Accelerate's loops alone; `test_contract.py` has what holds of all frameworks."""

import pytest
from accelerate import Accelerator

import autoaccum
from autoaccum.integrations.accelerate import auto_accumulate
from support.frameworks import by_accelerate
from support.frameworks.jobs import Job, Net, cross_entropy


def test_a_model_that_is_not_prepared_is_refused():
    with by_accelerate.states_of_its_own(Job()), pytest.raises(autoaccum.errors.InvalidInputError, match="prepare"):
        auto_accumulate(Accelerator(cpu=True), Net(), loss=cross_entropy)
