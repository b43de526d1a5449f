"""The report of one run, and the forms that it can be shown in."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from refold.errors import BadReport
from refold.report.data import SCHEMA, VERSION, ReportData
from refold.report.json_data import decode
from refold.report.notebook import table
from refold.report.page import page
from refold.report.text import summary
from refold.saving.folder import replace_file


@dataclass(frozen=True)
class Report(ReportData):
    """The result of one run, ready to be shown as text, JSON, a notebook table or one offline page."""

    @classmethod
    def from_json(cls, text: str) -> Report:
        """The report that `to_json` wrote."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise BadReport(f"This is no report: it is not JSON ({error}). Give the text of `to_json`.") from error
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            raise BadReport(f'This is no report: its "schema" is not "{SCHEMA}". Give the text of `Report.to_json()`.')
        version = data.get("version")
        if not isinstance(version, int) or not 1 <= version <= VERSION:
            raise BadReport(
                f"The report has version {version!r}, and this Refold reads 1 to {VERSION}. Update Refold to read it."
            )
        report: Report = decode(cls, data)
        return report

    def to_html(self) -> str:
        """One self-contained page that needs no network."""
        return page(self)

    def write_html(self, path: str | Path) -> Path:
        """Write the page to `path` whole or not at all."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        replace_file(target, self.to_html())
        return target

    def __str__(self) -> str:
        return summary(self)

    def _repr_html_(self) -> str:
        return table(self)
