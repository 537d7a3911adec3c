"""Reports: number formats, tables, charts, self-contained HTML pages, atomic file writes."""
