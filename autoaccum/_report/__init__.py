"""The pre-flight report: estimates what a training needs before it runs.

`api.preflight` takes a job as `fit` does, and names of GPUs. It returns a `Report` of frozen records; each output
format (table, JSON, page, picture) has its own module. May import `_estimate` and all packages below it,
but not its sibling `_training`.
"""

from autoaccum._report.records import Remedy
from autoaccum._report.report import Report

__all__ = ["Remedy", "Report"]
