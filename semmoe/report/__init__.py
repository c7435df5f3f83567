"""Self-contained HTML reports, with the same figures as PNG and SVG files beside them.

`write_report` makes the report of a comparison; `page`, `table`, `figure`, `prose` and `Verdict` (page.py) make any other.
"""

from .html import write_report
from .page import Section, Verdict, figure, page, prose, table

__all__ = ["Section", "Verdict", "figure", "page", "prose", "table", "write_report"]
