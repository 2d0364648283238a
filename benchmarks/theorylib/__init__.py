"""Parts of ``benchmarks/theory.py``."""
