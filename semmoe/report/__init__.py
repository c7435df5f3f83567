"""Self-contained HTML report of a comparison, with the same figures as PNG and SVG files beside it."""

from .html import write_report

__all__ = ["write_report"]
