"""The report of a study: one self-contained page, its figures and its tables."""

from tah2.study.report.write import write_report

__all__ = ["write_report"]
