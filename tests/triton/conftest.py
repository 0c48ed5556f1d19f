"""Triton's kernels without a GPU: numerics through its interpreter, and compilation for GPUs that are not here.

Triton decides when it is first imported whether kernels are interpreted. So everything under ``interpreted`` runs in a
process of its own with TRITON_INTERPRET=1 (``test_interpreted.py`` starts it), and the compiler's tests run without.
By hand: ``TRITON_INTERPRET=1 pytest tests/triton/interpreted``.
"""

import os

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore = ["test_compile.py", "test_interpreted.py"] if INTERPRETED else ["interpreted"]
