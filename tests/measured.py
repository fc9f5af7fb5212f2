"""What tests have measured, told at the end of the run."""

measured: dict[str, str] = {}
"""What, and how much. Of several workers each has its own; they meet in `tests/conftest.py`."""
