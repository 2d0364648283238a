"""Parts of ``benchmarks/train.py``."""
