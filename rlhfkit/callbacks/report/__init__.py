"""The report of a run: one HTML page that is written while it trains, and pages that compare runs.

May import: what callbacks may.
Start at :mod:`rlhfkit.callbacks.report.run_report`.
"""
