"""The pre-flight report: what a training will take, before it runs.

`api.preflight` takes a job as `fit` does, and names of cards; out comes a `Report` of frozen records, with one module
for each way to show it (a table, JSON, a page, a picture). `oom_view` shows the report that `_engine` writes when
memory runs out. May import `_estimate` and all packages below it, but not its sibling `_training`.
"""

from autoaccum._report.records import Remedy
from autoaccum._report.report import Report

__all__ = ["Remedy", "Report"]
