"""``report.html``: one self-contained page of one run or several, made at a run's end and on request."""

from framework.report.page import write

__all__ = ["write"]
