"""The pre-flight report: records that are filled once, and one file for each way to show them."""

from autoaccum.report.records import Remedy
from autoaccum.report.report import Report

__all__ = ["Remedy", "Report"]
