"""Generated from `host.proto` and `control.proto` by `generate.py`; not edited by hand."""
