"""Triton's kernels without a GPU: numerics through its interpreter, and compilation for GPUs that are not here.

Triton decides when it is first imported whether kernels are interpreted. So everything under ``interpreted`` runs in a
process of its own with TRITON_INTERPRET=1 (``test_interpreted.py`` starts it), and the compiler's tests run without.
By hand: ``TRITON_INTERPRET=1 pytest tests/triton/interpreted``.
"""

import os

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore = ["test_compile.py", "test_interpreted.py"] if INTERPRETED else ["interpreted"]
RESOURCES = "what kernels use"
"""Property of a test: lines for the end of pytest's output, wherever the test ran."""


def pytest_terminal_summary(terminalreporter):
    """Show what the compiler said. Tests that run side by side can't print; their properties come along with the results."""
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, [])]
    lines = [line for report in reports for name, found in report.user_properties if name == RESOURCES for line in found]
    if lines:
        terminalreporter.section("registers, spilled bytes and shared memory")
        for line in sorted(lines):
            terminalreporter.write_line(line)
