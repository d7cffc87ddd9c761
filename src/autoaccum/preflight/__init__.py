"""The pre-flight report's findings: measured on a device at hand, predicted for others, and put together."""

from autoaccum.preflight.preflight import preflight

__all__ = ["preflight"]
