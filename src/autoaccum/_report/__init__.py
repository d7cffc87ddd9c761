"""The pre-flight report: records that are filled once, and one file for each way to show them."""

from autoaccum._report.records import Remedy
from autoaccum._report.report import Report

__all__ = ["Remedy", "Report"]
