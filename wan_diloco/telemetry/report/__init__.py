"""The report of a run: one self-contained HTML file."""

from wan_diloco.telemetry.report.page import render_report

__all__ = ["render_report"]
